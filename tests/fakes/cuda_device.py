"""A CUDA device that is not there, so that the code for GPUs runs in tests without one.

A `CudaTensor` says that it lies on `cuda:i` and holds its numbers in CPU memory. Every operator goes through
`SimulatedCuda`, which refuses what a GPU refuses and computes the rest on the CPU:

* tensors of two devices in one operator, but for 0-dimensional CPU tensors and CPU tensors that index;
* while a graph is recorded: reading a tensor on the host, waiting, copies between the memories but to pinned
  ones of the host;
* division by a Python number is a product with its inverse, as in CUDA's kernels;
* writing to pinned memory that is being copied, until the host has waited for the copy: when it waits.

It counts the reads and copies that make the host wait (`num_syncs`): those to and from memory that is not
pinned, too. Streams and events keep an order: `torch.cuda`'s own sanitizer is told which stream reads and
writes what, and `races` holds what it objects to. A recorded graph is replayed operator by operator, into the
same tensors.

`with SimulatedCuda() as device:` replaces the names of `torch.cuda` for all threads; a further thread
computes inside `with device.on_thread():`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.cuda_calls import BRACKETS, Calls
from tests.fakes.cuda_streams import CurrentPlace, Event, Graph, Stream
from tests.fakes.leaves import leaves, mapped

VRAM = 1 << 48  # added to addresses, so that none of them is an address of the host
_aten = torch.ops.aten
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._index_put_impl_.default,
}
Module = TypeVar("Module", bound=nn.Module)


class CudaTensor(torch.Tensor):
    held: Tensor  # the numbers, on the CPU

    @staticmethod
    def __new__(cls, held: Tensor, index: int = 0) -> CudaTensor:
        held = _held(held)  # `torch.tensor` of a list with such tensors makes one of its own
        with torch.inference_mode(False):  # a view of a parameter must not become an inference tensor
            made = torch.Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
                dtype=held.dtype, device=torch.device("cuda", index), requires_grad=False,
            )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.held!r}, {self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return VRAM + self.held.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        device = SimulatedCuda.active
        if device is not None:
            device.recorded.setdefault(self.held.data_ptr(), set()).add(stream.number)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if SimulatedCuda.active is None:
            raise RuntimeError(f"{func} on a simulated GPU that has been closed")
        return SimulatedCuda.active.dispatch(func, args, kwargs or {})


class SimulatedCuda(CurrentPlace, TorchDispatchMode):
    active: SimulatedCuda | None = None

    def __init__(self, num_devices: int = 1, major: int = 9, *, orders: bool = False):
        """`orders`: the sanitizer looks at the order of streams, which takes longer than all else."""
        TorchDispatchMode.__init__(self)
        CurrentPlace.__init__(self, num_devices)
        self.orders = orders
        self.num_devices, self.major = num_devices, major
        self.operators: list[str] = []
        self.races: list[Exception] = []
        self.recorded: dict[int, set[int]] = {}  # by address: streams given to `record_stream`
        self.pinned: set[int] = set()  # addresses of pinned host memory
        self._patches: list[Any] = []

    # --- what tests use

    def put(self, module: Module, index: int = 0) -> Module:
        """The module's parameters and buffers on the device."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(CudaTensor(parameter.detach(), index), False)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = CudaTensor(buffer.detach(), index)
        return module

    @contextmanager
    def on_thread(self) -> Iterator[None]:
        torch._C._set_only_lift_cpu_tensors(True)
        with Calls(self), self._pushed():
            yield

    @contextmanager
    def _pushed(self) -> Iterator[None]:
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def kernel(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One launch: `work` over the tensors' numbers, without a look at what it does in between."""
        flat = leaves((args, kwargs))
        index = self._index_of(flat, strict=work not in BRACKETS)
        return self._run(work, getattr(work, "__name__", "kernel"), args, kwargs, flat, index)

    # --- operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func not in _COPIES and _is_composite(func):
            with self._pushed():
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        target = kwargs.pop("device", None)
        is_pinned = bool(kwargs.pop("pin_memory", False))
        flat = leaves((args, kwargs))
        index = self._index_of(flat, strict=func not in _COPIES and func not in _INDEXING)
        if func is _aten._local_scalar_dense.default and index is not None:
            self.sync("a tensor is read on the host")
        if func is _aten._foreach_copy_.default and not _is_one_launch(*args[:2]):
            for into, source in zip(*args[:2], strict=True):
                self._copy(_aten.copy_.default, (into, source), {}, None, False)
            return None
        if func in _COPIES and func is not _aten._foreach_copy_.default:
            return self._copy(func, args, kwargs, target, is_pinned)
        if func is _aten._pin_memory.default:
            return self._pin(args[0].clone())
        if func is _aten.is_pinned.default:
            return args[0].data_ptr() in self.pinned
        if target is not None:
            target = torch.device(target)
            index = self._place(target) if target.type == "cuda" else None
            kwargs["device"] = torch.device("cpu")
        if index is not None and func is _aten.div.Tensor and not _is_on_cuda(args[1]):
            number = args[1].item() if isinstance(args[1], Tensor) else args[1]
            args, func = (args[0], torch.tensor(1.0) / number), _aten.mul.Tensor
            flat = list(args)
        out = self._run(func, str(func), args, kwargs, flat, index)
        return self._pin(out) if is_pinned else out

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, flat: list[Any], index: int | None) -> Any:
        """`flat`: the leaves of the arguments."""
        if index is None and not any(map(_is_on_cuda, flat)):
            return func(*args, **kwargs)
        given, given_kwargs = mapped(_held, (args, kwargs))
        if index is None:  # what is made on the CPU after a tensor of the device
            return func(*given, **given_kwargs)
        if func is _aten.histc.default:
            func = _histc_of_integers
        out = func(*given, **given_kwargs)
        wrappers = {id(each.held): each for each in flat if isinstance(each, CudaTensor)}
        outs = leaves(out)
        self.operators.append(name)
        if func in _PRODUCTS:
            self.use_workspace()
        self._launch(func, name, flat, outs)
        if self.capture is not None:
            if any(isinstance(each, Tensor) and not _is_on_cuda(each) and each.dim() for each in flat):
                raise RuntimeError(f"CUDA error: {name} copies from the host while a graph is recorded")
            self.capture.add(func, given, given_kwargs, [each for each in outs if isinstance(each, Tensor)])

        def made(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return wrappers[id(each)] if id(each) in wrappers else CudaTensor(each, index)

        return mapped(made, out)

    def _launch(self, func: Any, name: str, flat: list[Any], outs: list[Any]) -> None:
        """Tells the sanitizer what the launch reads and writes. A view reads nothing."""
        if not self.orders:
            return
        inputs = {each.held.data_ptr() for each in flat if isinstance(each, CudaTensor)}
        results = {each.data_ptr() for each in outs if isinstance(each, Tensor)}
        schema = getattr(func, "_schema", None)
        if schema is not None and results <= inputs and not schema.is_mutable:
            return
        written = results if schema is not None and schema.is_mutable else results - inputs
        stream = self.current_stream()
        self.races += self.handler._handle_kernel_launch(
            stream.number, inputs - written, written, results, name, defaultdict(list)
        )

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], target: Any, is_pinned: bool) -> Any:
        if func is _aten.copy_.default:
            into, source = args[0], args[1]
            if _is_on_cuda(into) != _is_on_cuda(source):
                asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
                to_host = not _is_on_cuda(into)
                if not (to_host and asynchronous and self._is_pinned(into)):
                    self.crosses(asynchronous and not to_host)
                if not to_host and asynchronous and self._is_pinned(source):
                    self.send(source)
            _held(into).copy_(_held(source))
            if _is_on_cuda(into):
                self._note_copy(source, into)
            if self.capture is not None:
                self.capture.add(func, (_held(into), _held(source)), {}, [_held(into)])
            return into
        source, asynchronous = args[0], kwargs.pop("non_blocking", False)
        place = torch.device(target) if target is not None else source.device
        out = func(_held(source), **kwargs)
        if place.type == "cpu":
            if _is_on_cuda(source):
                self.crosses(False)
                out = out.clone() if out is _held(source) else out
            return self._pin(out) if is_pinned else out
        if not _is_on_cuda(source):
            self.crosses(asynchronous and (source.data_ptr() in self.pinned or not source.numel()))
        made = CudaTensor(out, self._place(place))
        self.operators.append(str(func))
        self._note_copy(source, made)
        if self.capture is not None:
            self.capture.add(func, (_held(source),), kwargs, [out])
        return made

    def _note_copy(self, source: Tensor, into: Any) -> None:
        if not self.orders:
            return
        read = {source.held.data_ptr()} if isinstance(source, CudaTensor) else set()
        written = {into.held.data_ptr()}
        number = self.current_stream().number
        self.races += self.handler._handle_kernel_launch(
            number, read, written, written, "copy", defaultdict(list)
        )

    def crosses(self, asynchronous: bool) -> None:
        if self.capture is not None:
            raise RuntimeError("CUDA error: a copy between host and device while a graph is recorded")
        if not asynchronous:
            self.sync("a copy between host and device")

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.data_ptr())
        return tensor

    def _index_of(self, flat: list[Any], *, strict: bool = True) -> int | None:
        """The device that the operator runs on; None: the CPU. `flat`: the leaves of its arguments."""
        tensors = [each for each in flat if isinstance(each, Tensor)]
        indices = {each.device.index for each in tensors if isinstance(each, CudaTensor)}
        on_cpu = [each for each in tensors if not isinstance(each, CudaTensor) and each.dim()]
        if len(indices) > 1 or (strict and indices and on_cpu):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices"
            )
        return indices.pop() if indices else None

    def __enter__(self) -> SimulatedCuda:
        properties = SimpleNamespace(
            major=self.major,
            minor=0,
            multi_processor_count=132,
            name="simulated",
            uuid="GPU-0",
            shared_memory_per_block_optin=232_448,
            L2_cache_size=1 << 10,
        )
        names: dict[str, Any] = {
            "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
            "device_count": lambda: self.num_devices, "current_device": self.current_device,
            "set_device": self.set_device, "_exchange_device": self._exchange,
            "_maybe_exchange_device": self._exchange, "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.default[self._place(torch.device(device or "cuda"))],
            "set_stream": self.set_stream, "stream": self._on_stream, "synchronize": self._synchronize,
            "Stream": lambda device=None, **_: Stream(
                self, self._place(torch.device("cuda" if device is None else device)), self.next_number()
            ),
            "Event": lambda **_: Event(self, self.next_number()),
            "CUDAGraph": lambda: Graph(self),
            "graph": self._record, "graph_pool_handle": lambda: (0, 1),
            "is_current_stream_capturing": lambda: self.capture is not None,
            "get_device_properties": lambda device=None: SimpleNamespace(
                **{**vars(properties), "uuid": f"GPU-{self._place(torch.device(device or 'cuda'))}"}
            ),
            "get_device_name": lambda device=None: "simulated",
            "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
            "memory_reserved": lambda device=None: 0, "max_memory_reserved": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None, "empty_cache": lambda: None,
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": self._set_sync_debug_mode,
        }  # fmt: skip
        self._patches = [mock.patch.object(torch.cuda, name, value) for name, value in names.items()]
        # a build for CPUs has no such name
        workspaces: dict[str, Any] = {"_cuda_clearCublasWorkspaces": self.clear_workspaces}
        self._patches.append(mock.patch.multiple(torch._C, create=True, **workspaces))
        for patch in self._patches:
            patch.start()
        SimulatedCuda.active = self
        # `torch.tensor(…, device="cuda")` is made on the CPU and copied, instead of asking the driver.
        torch._C._set_only_lift_cpu_tensors(True)
        self._calls = Calls(self)
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._calls.__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(False)
        SimulatedCuda.active = None
        for patch in self._patches:
            patch.stop()


_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_COPIES = {_aten._to_copy.default, _aten.copy_.default, _aten._foreach_copy_.default}


def _histc_of_integers(numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """On GPUs only."""
    return _aten.histc.default(numbers.float(), *args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Inference mode hands over what is made of other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_one_launch(into: list[Tensor], sources: list[Tensor]) -> bool:
    """torch copies a list in few launches if all of it lies on the device, and each pair in one way."""

    is_dense = all(_is_on_cuda(each) and each.is_contiguous() for each in (*into, *sources))
    return is_dense and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(into, sources, strict=True)
    )


def _is_on_cuda(each: Any) -> bool:
    return isinstance(each, CudaTensor)


def _held(each: Any) -> Any:
    return each.held if isinstance(each, CudaTensor) else each


def no_device() -> Any:
    """In place of `SimulatedCuda`: the same test on the CPU."""
    return nullcontext()
