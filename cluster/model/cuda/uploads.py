"""Copies to a GPU: numbers of a step, in one copy; and media tensors on a stream of their own, while the
encoder computes earlier items.

Untried on hardware.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Finish = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32")}
STAGING_BYTES = 16 << 20  # half a millisecond of a copy
_ALIGNED = 4  # numbers of 16 bytes: Triton compiles other code for a tensor that begins elsewhere


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """`upload_as_they_are`, as int32."""
    return upload_as_they_are([each.astype(np.int32) for each in arrays], device)


def upload_as_they_are(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays, of int32, int64 or float32, on the device. On a GPU each begins at a multiple of 16 bytes:
    one copy for all, from pinned memory. Enqueues, and does not wait."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(each)) for each in arrays]
    words = [np.ascontiguousarray(each).reshape(-1).view(np.int32) for each in arrays]
    starts = np.cumsum([0, *(-(-own.size // _ALIGNED) * _ALIGNED for own in words)]).tolist()
    packed = np.zeros(starts[-1], dtype=np.int32)
    for first, own in zip(starts, words, strict=False):
        packed[first : first + own.size] = own
    sent = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    found: list[Tensor] = []
    for first, own, each in zip(starts, words, arrays, strict=False):
        part = sent.narrow(0, first, own.size)
        part = part if each.dtype == np.int32 else part.view(_DTYPES[each.dtype])
        found.append(part if each.ndim == 1 else part.view(each.shape))
    return found


class Uploads:
    """`copy` blocks; any threads may call it except the one that computes. Owns `STAGING_BYTES` of pinned
    memory, through which all of them copy, a piece at a time: torch would keep as much as the largest item
    of each thread has taken."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device = device
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device)
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._lock = threading.Lock()  # of `_staging`

    def copy(self, item: Mapping[str, Tensor], finish: Finish) -> dict[str, Tensor]:
        """What `finish` makes of the item's tensors on the device, floating-point ones in the model's dtype;
        complete when this returns. Their memory belongs to this object's stream: others that use it say so
        (`record_stream`). Raises torch.OutOfMemoryError."""
        with torch.cuda.stream(self._stream):
            uploaded = {key: self._sent(self._in_dtype(value)) for key, value in item.items()}
            finished = {key: self._in_dtype(value) for key, value in finish(uploaded).items()}
            copied = self._stream.record_event()
        copied.synchronize()
        return finished

    def _sent(self, value: Tensor) -> Tensor:
        """Returns the tensor on the device, where its bytes are."""
        there = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        source, target = (each.view(-1).view(torch.uint8) for each in (value.contiguous(), there))
        size = len(self._staging)
        for some, into in zip(source.split(size), target.split(size), strict=True):
            with self._lock:
                staged = self._staging[: len(some)]
                staged.copy_(some)
                into.copy_(staged, non_blocking=True)
                self._stream.record_event().synchronize()
        return there

    def _in_dtype(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value
