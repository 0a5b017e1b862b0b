"""The other processes of a worker whose model is split over several GPUs (`tensor_parallel_size`), as rank 0
sees them.

Rank 0, the worker process, starts the other ranks on its own host before it loads its share of the model, and
they load theirs (cluster/worker/follower.py). Each has three pipes: for model calls, for transfers, and for
adapters that are loaded later. If a rank ends, the worker ends: `on_lost` is called at the end of the pipe. A
rank ends when its pipes end, so also when rank 0 is killed.

Order: `load_with_ranks` → `attach` → `stop`, after the last model call.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from cluster.config.environment import child_environment
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.model.parallel import ForwardProgress, LeadingModel, join_group, leave_group
from cluster.rpc.address import make_private
from cluster.types.members import Role
from cluster.worker.language import Language, LanguageSizes, load_language
from cluster.worker.setup import WorkerSetup
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import TransferEvent
from kv_transfer.lease.group import RankLink

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # until a rank has read its share of the weights
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that a rank is told. Pickled, from parent to child."""

    args: ClusterArgs
    replica_id: str  # of the worker
    host: str  # see `WorkerSetup`
    role: Role
    sizes: LanguageSizes
    rank: int
    meeting: Path
    num_threads: int
    lease_margin_s: float


def load_with_ranks(
    args: ClusterArgs, setup: WorkerSetup, role: Role, sizes: LanguageSizes, lease_margin_s: float
) -> tuple[Language, Ranks | None]:
    """`load_language` on one rank or, as configured, on several ranks that compute each step together. Raises
    ConfigError."""
    if args.tensor_parallel_size == 1:
        return load_language(args, setup, role, sizes), None
    ranks = Ranks(args, setup, role, sizes, lease_margin_s)
    try:
        language = ranks.load(args, setup, role, sizes)
    except BaseException:
        ranks.stop()
        raise
    return language, ranks


class Ranks:
    def __init__(
        self, args: ClusterArgs, setup: WorkerSetup, role: Role, sizes: LanguageSizes, lease_margin_s: float
    ):
        """Starts the other ranks."""
        self._lock = threading.Lock()
        self._is_stopping = False
        self._lost: int | None = None  # the first rank that ended unexpectedly
        self._on_lost: Callable[[int], None] | None = None
        self.progress = ForwardProgress()  # of rank 0
        self._leading: LeadingModel | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._calls: list[Connection] = []
        self.adapters: list[Connection] = []  # see `adapter_loading`
        self.links: list[RankLink] = []
        self.size = args.tensor_parallel_size
        make_private(setup.folder)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=setup.folder))
        meeting = self._meeting = self._folder / "meeting"
        num_threads = max(1, torch.get_num_threads() // self.size)
        torch.set_num_threads(num_threads)
        for rank in range(1, self.size):
            calls, transfers, adapters = self._spawn()
            self._calls.append(calls)
            self.adapters.append(adapters)
            self.links.append(RankLink(transfers))
            transfers.send(
                RankSpec(
                    args=args,
                    replica_id=setup.replica_id,
                    host=setup.host,
                    role=role,
                    sizes=sizes,
                    rank=rank,
                    meeting=meeting,
                    num_threads=num_threads,
                    lease_margin_s=lease_margin_s,
                )
            )
            threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def load(self, args: ClusterArgs, setup: WorkerSetup, role: Role, sizes: LanguageSizes) -> Language:
        """Loads rank 0's share. Blocks until the other ranks have loaded theirs. Raises ConfigError if one of
        them cannot."""
        group = join_group(0, self.size, self._meeting, setup.device.type)
        language = load_language(args, setup, role, sizes, group)
        try:
            for link in self.links:
                link.wait_ready(START_TIMEOUT_S)
        except TransferError as error:
            raise ConfigError(str(error), param="tensor_parallel_size") from error
        dtype = language.model.dtype
        leading = LeadingModel(language.steps, self._calls, self.progress, dtype, group.device)
        self._leading = leading
        return dataclasses.replace(language, steps=leading)

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def attach(self, on_event: Callable[[int, TransferEvent], None], on_lost: Callable[[int], None]) -> None:
        """Called once, before the first transfer. `on_event(rank, event)`: an event of that rank's transfers.
        `on_lost(rank)`: the rank has ended unexpectedly, now or earlier; called once, for the first one. Both
        are called from any thread."""
        with self._lock:
            self._on_event, self._on_lost = on_event, on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def stop(self) -> None:
        """Lets the other ranks finish their transfers, then ends them. Blocks up to twice `STOP_TIMEOUT_S`.
        May be repeated."""
        with self._lock:
            self._is_stopping = True
        for calls in self._calls:
            calls.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("rank process %d does not end; it is killed", process.pid)
                process.kill()
                process.wait()
        for adapters in self.adapters:  # not before: a thread may wait for an answer
            adapters.close()
        if self._leading is not None:
            self._leading.close()
            self._leading = None
        # NCCL's own end has no deadline: a recorded collective may wait for a rank that is lost
        leaving = threading.Thread(target=leave_group, name="leave-group", daemon=True)
        leaving.start()
        leaving.join(STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, rank: int) -> None:
        try:
            self.links[rank - 1].listen(lambda event: self._on_event(rank, event))
        finally:  # also if listening ended because of a bug: a rank whose pipe is not read is lost
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        with self._lock:
            if self._is_stopping or self._lost is not None:
                return
            self._lost, on_lost = rank, self._on_lost
        logger.error("rank %d of this worker has ended", rank)
        if on_lost is not None:
            on_lost(rank)

    def _spawn(self) -> list[Connection]:
        """Rank 0's ends of the three pipes."""
        pairs = [socket.socketpair() for _ in range(3)]
        theirs = [pair[1].fileno() for pair in pairs]
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "cluster.worker.follower", *map(str, theirs)],
                env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
            )
        )
        for _, their_end in pairs:
            their_end.close()
        return [Connection(pair[0].detach()) for pair in pairs]
