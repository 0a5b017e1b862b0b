"""Which exceptions mean too little memory or a checkpoint that transformers cannot read."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

# What transformers raises for checkpoints that it cannot read, e.g. for a package that is not installed.
LOADING_ERRORS = (
    OSError, ValueError, TypeError, RuntimeError, ImportError, AttributeError, LookupError, AssertionError,
    SafetensorError,
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Includes the error of torch's CPU allocator, which has no exception class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
