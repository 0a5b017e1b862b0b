"""What went wrong while an item was prepared or encoded, by name."""

from __future__ import annotations

import logging

import torch

from cluster.errors import ClusterError, InternalError, OverloadedError

logger = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Also what torch's CPU allocator raises, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def named(error: BaseException) -> ClusterError:
    """What the doors are told; the log has the rest."""
    if isinstance(error, ClusterError):
        return error
    if is_out_of_memory(error):
        return OverloadedError("the encoder ran out of memory", retry_after_s=1.0)
    logger.error("encoding failed", exc_info=error)
    return InternalError("the item could not be encoded; see the encoder's log")
