"""Copies media tensors to a GPU on a stream of their own, while the encoder computes earlier items.

Untried on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Finish = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


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
