"""The other processes of a worker whose model is split over several GPUs (`tensor_parallel_size`), as rank 0
sees them.

Rank 0, the worker process, starts the other ranks on its own host before it loads its share of the model, and
they load theirs (cluster/worker/follower.py). Each has three pipes: for model calls, for transfers, and for
adapters that are loaded later. If a rank ends, the worker ends: `on_lost` is called at the end of the pipe. A
rank ends when its pipes end, so also when rank 0 is killed.

In a start, no rank waits for another one that has failed: what may meet the others runs on a thread beside
the one that waits (`Ranks.run`), which ends all of them with the first one's error.

Order: `load_with_ranks` → `run`, for the rest of the start → `attach` → `stop`, after the last model call.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from cluster.config.environment import child_environment
from cluster.config.settings import ClusterArgs
from cluster.errors import ClusterError, ConfigError
from cluster.model.collectives import OtherRankError
from cluster.model.parallel import ForwardProgress, LeadingModel, join_group, leave_group
from cluster.rpc.address import make_private
from cluster.types.members import Role
from cluster.worker.language import Language, LanguageSizes, load_language
from cluster.worker.setup import WorkerSetup
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import TransferEvent
from kv_transfer.lease.group import RankLink
from kv_transfer.lease.rank_follower import RankFailed

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # until a rank has read its share of the weights
STOP_TIMEOUT_S = 10.0
ABANDON_TIMEOUT_S = 1.0  # a failed start leaves the group, unless a collective keeps it
FOLLOWER = "cluster.worker.follower"

Result = TypeVar("Result")


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
    return ranks.load(args, setup, role, sizes), ranks


class Ranks:
    def __init__(
        self, args: ClusterArgs, setup: WorkerSetup, role: Role, sizes: LanguageSizes, lease_margin_s: float,
        follower: str = FOLLOWER,
    ):  # fmt: skip
        """Starts the other ranks. follower: the module that they run."""
        self._lock = threading.Lock()
        self._is_stopping = False
        self._lost: Future[int] = Future()  # the first rank that ended unexpectedly
        self._listeners: list[threading.Thread] = []
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
            calls, transfers, adapters = self._spawn(follower)
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
            listener = threading.Thread(
                target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True
            )  # fmt: skip
            listener.start()
            self._listeners.append(listener)

    def load(self, args: ClusterArgs, setup: WorkerSetup, role: Role, sizes: LanguageSizes) -> Language:
        """Loads rank 0's share. Blocks until the other ranks have loaded theirs. Raises ConfigError if one of
        them cannot."""

        def load_all() -> Language:
            group = join_group(0, self.size, self._meeting, setup.device.type)
            language = load_language(args, setup, role, sizes, group)
            try:
                for link in self.links:
                    link.wait_ready(START_TIMEOUT_S)
            except TransferError as error:
                raise ConfigError(str(error), param="tensor_parallel_size") from error
            dtype = language.model.dtype
            leading = LeadingModel(language.steps, self._calls, self.progress, dtype, group.device)
            return dataclasses.replace(language, steps=leading)

        language = self.run(load_all)
        assert isinstance(language.steps, LeadingModel)
        self._leading = language.steps
        return language

    def run(self, work: Callable[[], Result]) -> Result:
        """Runs a part of the start in which rank 0 may wait for the others. If a rank fails, this one
        included, ends the others and raises the error of the first that failed: its own as it is, another
        one's as a ConfigError that names the rank. Blocks. The thread of the work may go on then, inside of
        a collective: this process has to end."""
        own: Future[Result] = Future()
        failures: list[RankFailed] = []

        def settle() -> None:
            try:
                own.set_result(work())
            except BaseException as error:  # raised below, unless another rank's came first
                failures.append(failure_of(0, error))
                own.set_exception(error)

        threading.Thread(target=settle, name="start", daemon=True).start()
        either: Any = (own, self._lost)
        wait(either, return_when=FIRST_COMPLETED)
        if own.done() and own.exception() is None:
            return own.result()
        # what ranks have reported is read to its end before the first is chosen
        failures += self._end_others()
        first = first_failure(failures)
        if first.rank == 0:
            own.result()
        raise ConfigError(f"rank {first.rank}: {first.message}", param=first.param)

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def attach(self, on_event: Callable[[int, TransferEvent], None], on_lost: Callable[[int], None]) -> None:
        """Called once, before the first transfer. `on_event(rank, event)`: an event of that rank's transfers.
        `on_lost(rank)`: the rank has ended unexpectedly, now or earlier; called once, for the first one. Both
        are called from any thread."""
        self._on_event = on_event
        self._lost.add_done_callback(lambda lost: on_lost(lost.result()))

    def stop(self) -> None:
        """Lets the other ranks finish their transfers, then ends them. Blocks up to twice `STOP_TIMEOUT_S`.
        May be repeated."""
        with self._lock:
            self._is_stopping = True
        self._end(STOP_TIMEOUT_S)

    def _end_others(self) -> list[RankFailed]:
        """Ends a start. Returns why those other ranks have ended that did so by themselves."""
        with self._lock:
            self._is_stopping = True
        for process in self._processes:
            process.terminate()  # nothing, if it has ended
        codes = list(map(_code_of_its_own, self._processes))
        for listener in self._listeners:
            listener.join(STOP_TIMEOUT_S)
        self._end(ABANDON_TIMEOUT_S)
        failures = []
        for rank, (link, code) in enumerate(zip(self.links, codes, strict=True), 1):
            is_lost = self._lost.done() and self._lost.result() == rank
            if link.failure is not None:
                failures.append(link.failure)
            elif code is not None or is_lost:  # without a word: no error of another rank did that
                failures.append(RankFailed(rank, f"its process has ended{_by(code)}", None, at=0.0))
        return failures

    def _end(self, timeout_s: float) -> None:
        """timeout_s: to leave the group."""
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
        leaving.join(timeout_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, rank: int) -> None:
        try:
            self.links[rank - 1].listen(lambda event: self._on_event(rank, event))
        finally:  # also if listening ended because of a bug: a rank whose pipe is not read is lost
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        with self._lock:
            if self._is_stopping:
                return
        with suppress(InvalidStateError):  # it is not the first
            self._lost.set_result(rank)
            logger.error("rank %d of this worker has ended", rank)

    def _spawn(self, follower: str) -> list[Connection]:
        """Rank 0's ends of the three pipes."""
        pairs = [socket.socketpair() for _ in range(3)]
        theirs = [pair[1].fileno() for pair in pairs]
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", follower, *map(str, theirs)],
                env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
            )
        )
        for _, their_end in pairs:
            their_end.close()
        return [Connection(pair[0].detach()) for pair in pairs]


def first_failure(failures: Sequence[RankFailed]) -> RankFailed:
    """Returns the one that the others follow from."""
    return min(failures, key=lambda failure: (not failure.is_own, failure.at))


def failure_of(rank: int, error: BaseException) -> RankFailed:
    """What a rank reports of the error that ends it. Call it when the error is caught."""
    message = error.message if isinstance(error, ClusterError) else f"{type(error).__name__}: {error}"
    param = error.param if isinstance(error, ClusterError) else None
    return RankFailed(rank, message, param, time.monotonic(), not isinstance(error, OtherRankError))


def _code_of_its_own(process: subprocess.Popen[bytes]) -> int | None:
    """Waits for a process that was terminated. Returns its exit code if it had ended by itself."""
    try:
        code = process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # `_end` kills it
        return None
    return None if code == -signal.SIGTERM else code


def _by(code: int | None) -> str:
    if code is None:
        return ""
    return f" with exit code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
