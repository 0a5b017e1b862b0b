"""The openers of this process (`opener`): all its pools share one server."""

from __future__ import annotations

import functools

from cluster.media.opener import Written
from cluster.media.processes import PoolProcess, ProcessPool, ProcessServer


@functools.cache
def opener_server() -> ProcessServer[Written]:
    return ProcessServer(Written, "cluster.media.opener")


def opener_pool() -> ProcessPool[Written]:
    return ProcessPool(lambda: PoolProcess(opener_server()))
