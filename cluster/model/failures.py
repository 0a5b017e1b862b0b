"""What an exception says about the device that it came from."""

from __future__ import annotations

import torch


class DeviceLostError(Exception):
    """The device, or a process that shares the model, cannot be used any more: the worker has to be replaced."""


def is_device_lost(error: BaseException) -> bool:
    """CUDA's errors stick: every later call fails, too. cuBLAS and cuDNN report theirs without a class of their own."""
    if isinstance(error, DeviceLostError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Also what torch's CPU allocator raises, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
