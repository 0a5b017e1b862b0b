"""The adapter between Serve and a worker service: one process of one pool.

Order: `__init__` imports and builds the service (torch is loaded here, in the replica only, never in the process that
composes the application) → `record_replica_metadata` opens its side channel and publishes its `Member` → `check_health`
every period → Serve takes it off the list and drains its calls → `__del__` waits until the doors, which see the list, have nothing
left here, then stops the service. Only decode's requests are calls of Serve's: without that wait encode and prefill workers would look
idle in the middle of their work. Serve runs all of it on the replica's user loop, apart from `__init__`, which may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import ray
from ray import serve

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError, UnavailableError
from cluster.serving.exposure import bind_to_node_address
from cluster.serving.published import encode_member
from cluster.types.members import Member

DRAIN_S = 14.0  # of the time that Serve gives a replica to end (cluster.app); the rest is for stopping


class WorkerService(Protocol):
    def __init__(self, args: ClusterArgs, replica_id: str): ...

    async def start(self) -> Member: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...

    def check_health(self) -> None: ...


def freeze_what_is_loaded() -> None:
    """Modules, models and tokenizers stay for good. Collections that visited them all held the door's event loop up; bench/fuzz/README.md
    has the figures."""
    gc.collect()
    gc.freeze()


def load(path: str) -> Any:
    """ "package.module:Name" → the object."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Replica:
    """Encode and prefill: everything a request needs goes over the side channel."""

    def __init__(self, args: ClusterArgs, service: str, threads: int, cores: Sequence[int]):
        """Raises ConfigError for cores that this host has not got."""
        bind_to_node_address()
        if cores:
            _bind_to(cores)  # before torch makes threads
        import torch  # the composing process must not load it

        torch.set_num_threads(threads)
        replica_id = serve.get_replica_context().replica_id.unique_id
        if args.side_channel == "tcp":
            args = args.model_copy(update={"host": ray.util.get_node_ip_address()})
        self._service = load(service)(args, replica_id)
        self._is_stopping = False

    async def record_replica_metadata(self) -> dict[str, str]:
        member = await self._service.start()
        freeze_what_is_loaded()
        return encode_member(member)

    async def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            await service.drain(DRAIN_S)
            await service.stop()


def _bind_to(cores: Sequence[int]) -> None:
    """This process with all its threads, so also those that exist already."""
    here = os.sched_getaffinity(0)
    if not here.issuperset(cores):
        raise ConfigError(
            f"cores {sorted(set(cores) - here)} are not among this host's {sorted(here)}", param="cores"
        )
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


class DecodeReplica(Replica):
    """Decode: one Serve call per request, open for as long as it generates, so that Serve's drain and limits see it."""

    async def run(self, request_id: str) -> None:
        try:
            await self._service.run(request_id)
        except asyncio.CancelledError:
            raise
        except RuntimeError as error:
            raise UnavailableError(f"decode could not run {request_id}: {error}") from error
