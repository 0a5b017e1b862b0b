"""Copies media tensors to a GPU on a stream of their own, while the encoder computes earlier items.

Untried on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Uploads:
    """`copy` blocks; any threads may call it except the one that computes."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device = device
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device)

    def copy(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The item's tensors on the device, floating-point ones in the model's dtype; complete when this
        returns. Raises torch.OutOfMemoryError."""
        uploaded = {}
        with torch.cuda.stream(self._stream):
            for key, value in item.items():
                host = value.to(self._dtype) if value.is_floating_point() else value
                uploaded[key] = host.pin_memory().to(self._device, non_blocking=True)
                # The memory belongs to this stream. The allocator must wait for the encoder's stream before
                # it reuses the memory.
                uploaded[key].record_stream(torch.cuda.default_stream(self._device))
            copied = self._stream.record_event()
        copied.synchronize()
        return uploaded
