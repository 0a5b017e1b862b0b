"""Which exceptions mean that the device is lost: every later call fails as well, and the worker must be
replaced."""

from __future__ import annotations

import torch

# What CUDA says of such errors, by whatever library
_LOST = (
    "illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure",
    "device-side assert", "invalid program counter", "invalid address space", "hardware stack error",
    "uncorrectable", "launch timed out", "context is destroyed",
)  # fmt: skip


class DeviceLostError(Exception):
    """The device, or a process that shares the model, cannot be used any more."""


def is_device_lost(error: BaseException) -> bool:
    """Whether every later call fails as well, as after a CUDA error. cuBLAS, cuDNN, Triton and the driver
    report errors without an exception class of their own; Triton also those of one kernel alone."""
    if isinstance(error, DeviceLostError | torch.AcceleratorError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("CUDA error" in text or any(lost in text for lost in _LOST))


def raise_if_device_lost(error: Exception) -> None:
    """For code that lets an error end one piece of work: this one concerns all of them. Raises it again as a
    DeviceLostError, which can be pickled."""
    if is_device_lost(error):
        raise DeviceLostError(f"{type(error).__name__}: {error}") from error
