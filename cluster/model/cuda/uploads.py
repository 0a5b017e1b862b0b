"""Media tensors on their way to a GPU, on a stream of their own: a copy runs while the encoder computes what came before.

Untried on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Uploads:
    """Any number of threads, none of them the one that computes: `copy` blocks."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device = device
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device)

    def copy(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The item's tensors on the device, floating-point ones in the model's dtype; complete when this returns. Raises
        torch.OutOfMemoryError."""
        uploaded = {}
        with torch.cuda.stream(self._stream):
            for key, value in item.items():
                host = value.to(self._dtype) if value.is_floating_point() else value
                uploaded[key] = host.pin_memory().to(self._device, non_blocking=True)
                # Its memory belongs to this stream; the allocator must wait for the encoder's before it gives it away again.
                uploaded[key].record_stream(torch.cuda.default_stream(self._device))
            copied = self._stream.record_event()
        copied.synchronize()
        return uploaded
