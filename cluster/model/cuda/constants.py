"""What a call computes of constants alone, found in one run of it and taken over by later ones.

A CUDA graph must not read the device on the host, wait, or copy between host and device. An encoder does
all three, but only with numbers that follow from its small integer inputs (grids, sizes, masks): the
positions of patches, the edges of windows, lengths to split at. If these inputs are the same in every call,
so are the results. Order: `watch`, once, a plain run → `take_over`, each later run of the same call, recorded
or not. Later runs launch nothing for constants and wait for nothing, and all else runs as before.

An operator is constant if every tensor that it is given is: a constant input, a result of a constant
operator, or a tensor in the host's memory (a run that copies anything else there is refused). Parameters are
not constants. Fresh memory without contents is not one either, as launches that torch does not know may fill
it. `torch.tensor` reads tensors among its numbers out of sight: it is given their copies on the host.

Runs on the calling thread alone, so what other threads do is neither seen nor changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.utils import import_utils

_aten = torch.ops.aten
_INDEXING = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default,
}  # fmt: skip
# Products run whole: they read nothing on the host, and their own code may take other kernels if a mode is
# active between their parts.
_WHOLE = {
    _aten.linear.default, _aten.matmul.default, _aten.einsum.default,
    _aten.scaled_dot_product_attention.default, _aten.conv1d.default, _aten.conv2d.default,
    _aten.conv3d.default, _aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding,
}  # fmt: skip
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_permuted.default}
# Its argument holds numbers of Python: those that the call wrote, or read from constants.
_LIFTED = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_MAX_RUNS = 16  # of a watched call
T = TypeVar("T")
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NotRecordableError(Exception):
    """The call does what no recording can repeat; the text says what."""


class _ChangedError(NotRecordableError):
    """Ends a watched run, in which `memory` turned out to be no constant."""

    def __init__(self, reason: str, memory: int):
        super().__init__(reason)
        self.memory = memory


class Constants:
    """The results of the constant operators of one call, in order."""

    def __init__(self, inputs: Iterable[Tensor], device: torch.device):
        """`inputs`: inference tensors; the same in every run, as objects and in their numbers. `device`: of
        the runs."""
        self._inputs = list(inputs)
        self._device = device
        self.backend = device.type.upper()  # torch's name of the kernels that compute there
        # numbers of operators whose results the call writes to later, among those given constants alone: what
        # the call keeps (a table that it fills by a launch) may come in the first run only
        self._changed: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self._results: list[tuple[Any, Any]] = []  # operator, what it gave
        # Of constants, with the number of the operator that gave it. All are held, so no other tensor has it.
        self._memories: dict[int, int | None] = {_memory(tensor): None for tensor in self._inputs}
        self._given_again: list[Tensor] = []
        self._read: set[int] = set()  # memories of constants that other operators have read

    @property
    def num_bytes(self) -> int:
        results = tree_leaves([out for _, out in self._results])
        sizes = {
            _memory(leaf): leaf.untyped_storage().nbytes() for leaf in results if isinstance(leaf, Tensor)
        }
        return sum(sizes.values())

    def watch(self, run: Callable[[], T]) -> T:
        """Runs as always, and keeps the constants; again, if what looked constant was written to. Raises
        NotRecordableError."""
        for _ in range(_MAX_RUNS - 1):
            try:
                with _alike(), _Watching(self):
                    return run()
            except _ChangedError as error:
                number = self._memories[error.memory]
                if number is None:
                    raise
                self._changed.add(number)
            self._forget()
        with _alike(), _Watching(self):
            return run()

    def take_over(self, run: Callable[[], T]) -> T:
        """Runs with the constants that were kept. Raises NotRecordableError if they come in another order."""
        with _alike(), _TakingOver(self):
            return run()

    def has(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._device.type or _memory(tensor) in self._memories

    def is_changed(self, number: int) -> bool:
        return number in self._changed

    def may_be(self, operator: Any, given: list[Tensor]) -> bool:
        """Whether the operator gives a constant, if that is not written to later."""
        if not given:
            return operator not in _EMPTY and torch.Tag.nondeterministic_seeded not in operator.tags
        return operator in _LIFTED or all(map(self.has, given))

    def keep(self, operator: Any, number: int, out: Any) -> None:
        self._results.append((operator, out))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._memories.setdefault(_memory(leaf), number)

    def result(self, place: int, operator: Any) -> Any:
        if place >= len(self._results) or self._results[place][0] is not operator:
            raise NotRecordableError(f"it calls {operator} in one run and not in the next")
        return tree_map(self._again, self._results[place][1])  # lists are new ones

    def _again(self, leaf: Any) -> Any:
        """torch takes only inference tensors as results of views for a second time."""
        if not isinstance(leaf, Tensor) or leaf.is_inference():
            return leaf
        again = leaf.detach()
        self._memories.setdefault(_memory(again), None)
        self._given_again.append(again)
        return again

    def note(self, operator: Any, given: list[Tensor], written: list[Tensor], is_constant: bool) -> None:
        """Raises NotRecordableError if a later run would find a constant changed."""
        for memory in (_memory(tensor) for tensor in written if self.has(tensor)):
            if not is_constant or memory in self._read:
                raise _ChangedError(f"{operator} changes a constant", memory)
        if not is_constant:
            self._read.update(_memory(tensor) for tensor in given if self.has(tensor))


class _Watching(TorchDispatchMode):
    def __init__(self, constants: Constants):
        super().__init__()
        self._constants = constants
        self._number = 0  # of operators so far that may give a constant

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_constant = self._constants.may_be(func, tensors)
        if is_constant:
            self._number += 1
            is_constant = not self._constants.is_changed(self._number)
        if not is_constant and _is_composite(func, self._constants.backend):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        self._note(func, tensors, _written(func, args, kwargs), is_constant)
        if is_constant:
            return self._constant(func, *args, **kwargs)
        if func in _INDEXING:
            placed = [self._placed(value, args[0].device) for value in args[2:]]
            args = (args[0], self._indices(func, args[0], args[1]), *placed)
        elif _READS & set(func.tags):
            raise NotRecordableError(f"{func} reads the device")
        out = func(*args, **kwargs)
        _check_places(func, tensors[:1] if func in _INDEXING else tensors, out)
        return out

    def _note(self, func: Any, given: list[Tensor], written: list[Tensor], is_constant: bool) -> None:
        self._constants.note(func, given, written, is_constant)

    def _constant(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._constants.keep(func, self._number, out)
        return out

    def _indices(self, func: Any, rows: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
        """As numbers on the device of the rows: the operator would read masks, and copy from the host."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or (not _is_mask(index) and index.device == rows.device):
                found.append(index)
            elif self._constants.has(index):
                found.extend(self._constant(_numbers, index, rows.device))
            else:
                raise NotRecordableError(f"{func} reads the device")
        return found

    def _placed(self, value: Any, device: torch.device) -> Any:
        """A number of the host, on the device: the operator would copy it."""
        is_elsewhere = isinstance(value, Tensor) and value.device != device
        return self._constant(_moved, value, device) if is_elsewhere else value


class _TakingOver(_Watching):
    def __init__(self, constants: Constants):
        super().__init__(constants)
        self._place = 0  # in the order of constants

    def _note(self, func: Any, given: list[Tensor], written: list[Tensor], is_constant: bool) -> None:
        pass  # noted while it was watched

    def _constant(self, func: Any, *_args: Any, **_kwargs: Any) -> Any:
        self._place += 1
        return self._constants.result(self._place - 1, func)


def _numbers(index: Tensor, device: torch.device) -> list[Tensor]:
    numbers = _aten.nonzero.default(index).unbind(1) if _is_mask(index) else (index,)
    return [each.to(device) for each in numbers]


def _moved(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _check_places(func: Any, tensors: list[Tensor], out: Any) -> None:
    places = {tensor.device.type for tensor in tensors if tensor.dim()}
    results = {leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
    if len(places) > 1 or (places and results - places):
        raise NotRecordableError(f"{func} copies between host and device")


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | {**kwargs}
    written = [
        named.get(argument.name)
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@cache
def _is_composite(func: Any, backend: str) -> bool:
    """Whether it is made of other operators: inference mode hands it over whole."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return (
        func not in _WHOLE and has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, backend)
    )


class _CopyingNumbers(TorchFunctionMode):
    """`torch.tensor` of a list reads the tensors in it where no dispatch mode sees it: in a recording, that
    ends it. Their copies on the host are seen."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], list | tuple):
            args = (tree_map(_on_host, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _alike() -> Iterator[None]:
    """Inside, runs take the same operators, recorded or not, and all of them are in sight. `torch.tensor` of
    Python's numbers makes them on the host, and copies them by an operator of its own. transformers, which
    builds masks without a look at them while a stream is recorded, is told that none is. Both switches are
    the process's; what other threads compute stays the same."""
    lifts, is_recorded = torch._C._only_lift_cpu_tensors(), import_utils.is_cuda_stream_capturing
    torch._C._set_only_lift_cpu_tensors(True)
    import_utils.is_cuda_stream_capturing = lambda: False
    try:
        with _CopyingNumbers():
            yield
    finally:
        import_utils.is_cuda_stream_capturing = is_recorded
        torch._C._set_only_lift_cpu_tensors(lifts)
