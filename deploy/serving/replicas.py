"""The adapter between Serve and a worker service: one process of one pool.

Life cycle:

1. `__init__` imports and builds the service. torch is loaded here, in the replica, and never in the process
   that composes the application. It may block: nothing else runs in the replica before it ends. All other
   steps must not block.
2. `record_replica_metadata` opens the side channel and publishes the service's `Member`.
3. `check_health` is open nearly all the time (`held_check`).
4. `reconfigure` assigns phases to it, at the start and again at any time.
5. Serve removes the replica from its list and drains its calls.
6. `__del__` waits until the doors, which see the list, have no requests left here, and stops the service. The
   wait is necessary because only decode's requests are Serve calls: encode and prefill workers look idle to
   Serve while they work.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import serve

from cluster.config.machine import has_triton
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError, UnavailableError
from deploy.serving.exposure import bind_to_node_address
from deploy.serving.gauges import WorkerGauges
from deploy.serving.held_check import HeldCheck
from deploy.serving.membership import encode_member

DRAIN_S = 14.0  # part of the time that Serve gives a replica to end (deploy.app); the rest is for stopping


def freeze_what_is_loaded() -> None:
    """Excludes modules, models and tokenizers from garbage collection, because they stay until the process
    ends. Collections that visited all of them blocked the door's event loop; bench/fuzz/README.md has the
    figures."""
    gc.collect()
    gc.freeze()


def load(path: str) -> Any:
    """The object at an import path "package.module:Name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def _with_advice() -> Iterator[None]:
    """Around a start. If the device is lost in it, and our kernels may have broken it, the error says what an
    operator can do."""
    from cluster.lost_device import DeviceLostError, is_device_lost  # they import torch

    try:
        yield
    except Exception as error:
        if not is_device_lost(error) or not has_triton():
            raise
        advice = "if every start ends like this, `gpu_kernels: none` serves without our kernels"
        raise DeviceLostError(f"{type(error).__name__}: {error}; {advice}") from error


class Replica:
    """An encode or prefill replica. Requests use the side channel only."""

    def __init__(self, args: ClusterArgs, service: str, threads: int, cores: Sequence[int]):
        """Raises ConfigError for cores that this host does not have."""
        bind_to_node_address()
        if cores:
            _bind_to(cores)  # before torch starts threads
        import torch  # the composing process must not load it

        from cluster.worker.setup import set_up

        torch.set_num_threads(threads)
        context = serve.get_replica_context()
        replica_id, self._app = context.replica_id.unique_id, context.app_name
        host = {"host": ray.util.get_node_ip_address()} if args.side_channel == "tcp" else {}
        with _with_advice():
            self._service = load(service)(args, set_up(args, replica_id, **host))
        self._replica_id = replica_id
        self._held_check = HeldCheck()
        self._gauges: WorkerGauges | None = None

    async def record_replica_metadata(self) -> dict[str, str]:
        with _with_advice():
            member = await self._service.start()
        self._gauges = WorkerGauges(member.num_blocks)
        freeze_what_is_loaded()
        return encode_member(member)

    def reconfigure(self, user_config: dict[str, Any] | None, rank: Any = None) -> None:
        """Serve calls this at the start and whenever `user_config` in the configuration changes; the process
        goes on. `phases_by_rank`: of the replica with rank i the phases that it shall do; the last entry
        holds for all others. Raises ConfigError."""
        by_rank = (user_config or {}).get("phases_by_rank")
        if unknown := sorted(set(user_config or ()) - {"phases_by_rank"}):
            raise ConfigError(f"unknown fields of user_config: {', '.join(unknown)}", param=unknown[0])
        self._service.assign(by_rank[min(rank.rank, len(by_rank) - 1)] if by_rank else None)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it once a second if the deployment has an `autoscaling_config`. The doors report to the
        policy how busy this worker is; this worker asks what it shall do."""
        from deploy.serving.scaling import assigned_phases

        phases = await asyncio.to_thread(assigned_phases, self._app, self._replica_id)
        if phases is not None:
            self._service.assign(phases)
        return {}

    async def check_health(self) -> None:
        await self._held_check.hold()
        self._service.check_health()
        if self._gauges is not None:
            self._gauges.set(self._service.loads())

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            await service.drain(DRAIN_S)
            await service.stop()


def _bind_to(cores: Sequence[int]) -> None:
    """Binds this process with all its threads, including those that exist already."""
    here = os.sched_getaffinity(0)
    if not here.issuperset(cores):
        raise ConfigError(
            f"cores {sorted(set(cores) - here)} are not among this host's {sorted(here)}", param="cores"
        )
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


class DecodeReplica(Replica):
    """A decode replica. One Serve call per request stays open while the request generates, so that Serve's
    drain and limits see it."""

    async def run(self, request_id: str) -> None:
        try:
            await self._service.run(request_id)
        except asyncio.CancelledError:
            raise
        except RuntimeError as error:
            raise UnavailableError(f"decode could not run {request_id}: {error}") from error
