"""Calls of torch's functions while a CUDA device is simulated (`cuda_device`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.fakes.brackets import get_item, set_item
from tests.fakes.leaves import leaves, mapped

if TYPE_CHECKING:
    from tests.fakes.cuda_device import SimulatedCuda

_OPEN = torch.device("cuda")
_aten = torch.ops.aten
_NOT_THERE = (  # what torch says of a device: built without CUDA; built with it, without a driver or a GPU
    "not linked with support for cuda",
    "CUDA driver version is insufficient",
    "no CUDA-capable device",
)
BRACKETS = {Tensor.__getitem__: get_item, Tensor.__setitem__: set_item}
_READS = {Tensor.__index__: int, Tensor.__int__: int, Tensor.__float__: float}  # on the host
_WHOLE = {F.scaled_dot_product_attention, *BRACKETS}


class Calls(TorchFunctionMode):
    """Calls of torch's functions: "cuda" becomes the current device, as torch built without CUDA cannot ask
    for it. Fused attention is one launch, and so is what is between brackets, for which torch asks the
    driver, too."""

    def __init__(self, device: SimulatedCuda):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func in BRACKETS:
            args = (args[0], _with_read_bounds(args[1]), *args[2:])
            if _is_on_cuda(args[0]) and any(isinstance(each, list) for each in _parts(args[1])):
                self._device.sync("a list between brackets is copied to the device")
            if _get_current_dispatch_mode() is not self._device:  # something looks at every operator
                return BRACKETS[func](*args)
        if func is torch.tensor and any(map(_is_on_cuda, leaves(args[:1]))):
            self._device.sync("torch.tensor reads the tensors among its numbers")
        if func in _READS and _is_on_cuda(args[0]):
            return _READS[func](args[0].item())
        if func is torch.full and args:  # torch reads such sizes, too, but asks the driver
            args = (tuple(each.item() if _is_on_cuda(each) else each for each in args[0]), *args[1:])
        kwargs = kwargs or {}
        flat = leaves((args, kwargs))
        if func in _WHOLE and any(map(_is_on_cuda, flat)):
            return self._device.kernel(func, *args, **kwargs)
        if any(map(_is_open, flat)):
            args, kwargs = mapped(self._placed, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in _NOT_THERE):
                raise
            if func is Tensor.copy_:
                return self._device.dispatch(_aten.copy_.default, args, kwargs)
            return self._device.kernel(func, *args, **kwargs)

    def _placed(self, each: Any) -> Any:
        return torch.device("cuda", self._device.current_device()) if _is_open(each) else each


def _is_open(each: Any) -> bool:
    """Whether it is a CUDA device without a number."""
    return each == "cuda" if isinstance(each, str) else isinstance(each, torch.device) and each == _OPEN


def _with_read_bounds(index: Any) -> Any:
    """What stands between brackets; the host reads tensors that are the bounds of a slice."""
    if isinstance(index, tuple):
        return tuple(map(_with_read_bounds, index))
    if not isinstance(index, slice):
        return index
    bounds = (index.start, index.stop, index.step)
    return slice(*(each.item() if isinstance(each, Tensor) else each for each in bounds))


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_on_cuda(each: Any) -> bool:
    return isinstance(each, Tensor) and each.device.type == "cuda"
