"""Copies to a GPU: numbers of a step, in one copy; and media tensors on a stream of their own, while the
encoder computes earlier items.

Untried on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Finish = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
_ALIGNED = 4  # numbers of 16 bytes: Triton compiles other code for a tensor that begins elsewhere


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as int32 on the device, each beginning at a multiple of 16 bytes: one copy for all, from
    pinned memory on a GPU. Enqueues, and does not wait."""
    sizes = [-(-each.size // _ALIGNED) * _ALIGNED for each in arrays]
    packed = np.zeros(sum(sizes), dtype=np.int32)
    for first, each in zip(np.cumsum([0, *sizes]), arrays, strict=False):
        packed[first : first + each.size] = each.ravel()
    on_host = torch.from_numpy(packed)
    sent = (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)
    parts = zip(sent.split(sizes), arrays, strict=True)
    return [part[: each.size].view(each.shape) for part, each in parts]


class Uploads:
    """`copy` blocks; any threads may call it except the one that computes."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device = device
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device)

    def copy(self, item: Mapping[str, Tensor], finish: Finish) -> dict[str, Tensor]:
        """What `finish` makes of the item's tensors on the device, floating-point ones in the model's dtype;
        complete when this returns. Raises torch.OutOfMemoryError."""
        with torch.cuda.stream(self._stream):
            uploaded = {
                key: self._in_dtype(value).pin_memory().to(self._device, non_blocking=True)
                for key, value in item.items()
            }
            finished = {key: self._in_dtype(value) for key, value in finish(uploaded).items()}
            for value in finished.values():
                # The memory belongs to this stream. The allocator must wait for the encoder's stream before
                # it reuses the memory.
                value.record_stream(torch.cuda.default_stream(self._device))
            copied = self._stream.record_event()
        copied.synchronize()
        return finished

    def _in_dtype(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value
