"""On a GPU the programs of a launch run side by side, and nothing orders what they do. Triton's interpreter
runs them one after the other. Inside of `watched_programs()` it runs them in another order in each launch,
and a launch fails if

* a program reads or writes outside of the tensors that the launch was given,
* a program writes what another one reads or writes,
* a program reads what it has written: its threads do not wait for each other's stores,
* a program writes what it has read, unless its kernel is one of `IN_PLACE`.

Atomic additions are not looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

# Kernels whose programs write what they have read, and why no thread stores what another has yet to load:
IN_PLACE = {
    "add_norm",  # the row is stored in the layout that it was loaded in: each thread stores what it loaded
    "expand",  # likewise
    "solve_systems",  # products lie between, for which all threads wait for each other
    "draw_filtered",  # sums over the row lie between, likewise
}
NOTHING = np.zeros(0, np.uint64)


@dataclass
class _Launch:
    kernel: str
    spans: Mapping[str, tuple[int, int]]  # of the addresses of each tensor
    order: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of the programs
    grid: tuple[int, int, int] = (1, 1, 1)
    program: int = 0
    read: dict[int, list[np.ndarray]] = field(default_factory=dict)  # addresses, by program
    written: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def is_at(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        """The program that runs in the place of this one."""
        _, rows, columns = self.grid
        self.program = int(self.order[(x * rows + y) * columns + z])
        return self.program // (rows * columns), self.program // columns % rows, self.program % columns

    def loads(self, places: np.ndarray, size: int) -> None:
        self._check_inside(places, size)
        own = np.concatenate(self.written.get(self.program, [NOTHING]))
        self._refuse(places[np.isin(places, own)], "a program reads what it has written")
        self.read.setdefault(self.program, []).append(places)

    def stores(self, places: np.ndarray, size: int) -> None:
        self._check_inside(places, size)
        if self.kernel not in IN_PLACE:
            own = np.concatenate(self.read.get(self.program, [NOTHING]))
            self._refuse(places[np.isin(places, own)], "a program writes what it has read")
        self._refuse(places[_repeated(places)], "a program writes an element twice at once")
        self.written.setdefault(self.program, []).append(places)

    def ends(self) -> None:
        written, writers = _by_program(self.written)
        self._refuse(written[_repeated(written)], "two programs write the same")
        read, readers = _by_program(self.read)
        if len(written) and len(read):
            order = np.argsort(written)
            at = np.minimum(np.searchsorted(written[order], read), len(written) - 1)
            is_others = (written[order][at] == read) & (writers[order][at] != readers)
            self._refuse(read[is_others], "a program reads what another one writes")

    def _check_inside(self, places: np.ndarray, size: int) -> None:
        begins, ends = _joined(list(self.spans.values()))
        number = np.searchsorted(begins, places, side="right") - 1
        inside = (number >= 0) & (places + np.uint64(size) <= ends[np.maximum(number, 0)])
        self._refuse(places[~inside], f"a program (of {self.grid}) leaves the tensors of its launch")

    def _refuse(self, places: np.ndarray, fault: str) -> None:
        if not len(places):
            return
        names = [name for name, (begin, end) in self.spans.items() if begin <= places[0] < end]
        raise AssertionError(f"{self.kernel}: {fault}: {len(places)} elements, of {names or 'no tensor'}")


def _by_program(places: Mapping[int, Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Different addresses of each program, and the programs."""
    found = {program: np.unique(np.concatenate(each)) for program, each in places.items()}
    numbers = np.repeat(np.array([*found], np.int64), [len(each) for each in found.values()])
    return np.concatenate([NOTHING, *found.values()]), numbers


def _repeated(places: np.ndarray) -> np.ndarray:
    """Indices of elements that are there more than once."""
    order = np.argsort(places, kind="stable")
    return order[1:][places[order][1:] == places[order][:-1]]


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Begins and ends of the memory that these spans cover."""
    joined: list[list[int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    begins, ends = np.array(joined, np.uint64).reshape(-1, 2).T
    return begins, ends


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + last) * tensor.element_size()


@contextmanager
def watched_programs() -> Iterator[None]:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launches: list[_Launch] = []  # of which one runs
    generator = np.random.default_rng(0)
    plain: Any = InterpreterBuilder
    load, store = plain.create_masked_load, plain.create_masked_store
    set_grid_dim, set_grid_idx, call = plain.set_grid_dim, plain.set_grid_idx, GridExecutor.__call__

    def masked(pointers: Any, mask: Any) -> np.ndarray:
        data, is_there = np.broadcast_arrays(pointers.data, mask.data)
        return data[is_there.astype(bool)].astype(np.uint64)

    def size_of(pointers: Any) -> int:
        return pointers.get_element_ty().primitive_bitwidth // 8

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].loads(masked(pointers, mask), size_of(pointers))
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].stores(masked(pointers, mask), size_of(pointers))
        return store(self, pointers, value, mask, *rest)

    def shuffled(self: Any, *grid: int) -> None:
        set_grid_dim(self, *grid)
        launches[-1].grid = (grid[0], grid[1], grid[2])
        launches[-1].order = generator.permutation(grid[0] * grid[1] * grid[2])

    def placed(self: Any, x: int, y: int, z: int) -> None:
        set_grid_idx(self, *launches[-1].is_at(x, y, z))

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        names = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = {name: _span(each) for name, each in names.items() if isinstance(each, torch.Tensor)}
        launches.append(_Launch(self.fn.__name__, tensors))
        try:
            call(self, *args, **kwargs)
            launches[-1].ends()
        finally:
            launches.pop()

    builder = {
        "create_masked_load": watched_load, "create_masked_store": watched_store,
        "set_grid_dim": shuffled, "set_grid_idx": placed,
    }  # fmt: skip
    with (
        mock.patch.multiple(InterpreterBuilder, **builder),
        mock.patch.object(GridExecutor, "__call__", launched),
    ):
        yield
