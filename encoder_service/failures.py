"""Errors of preparing or encoding an item, in the form in which they are sent to doors."""

from __future__ import annotations

import logging

from cluster.errors import ClusterError, InternalError, OverloadedError
from cluster.lost_device import is_device_lost
from cluster.model.failures import is_out_of_memory

logger = logging.getLogger(__name__)


def named(error: BaseException) -> ClusterError:
    """The error that is sent to doors. Details of unexpected errors are in the log. Raises the error again if
    the device is lost: the encoder must be replaced."""
    if isinstance(error, ClusterError):
        return error
    if is_out_of_memory(error):
        return OverloadedError("the encoder ran out of memory", retry_after_s=1.0)
    if is_device_lost(error):
        raise error
    logger.error("encoding failed", exc_info=error)
    return InternalError("the item could not be encoded; see the encoder's log")
