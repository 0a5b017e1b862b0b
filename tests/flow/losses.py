"""A worker whose process dies while it works for many requests."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cluster.types.members import ProcessId
from cluster.worker.process import WorkerProcess
from kv_transfer.agents.factory import _LOCAL_NETWORK as network
from kv_transfer.lease.processes import process_id
from tests.flow.local_cluster import HANG_S


class StandIns:
    """The processes that workers say they are, one for each: they can be killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._children: dict[str, tuple[subprocess.Popen[bytes], ProcessId]] = {}

        def processes(process: WorkerProcess) -> tuple[ProcessId, ...]:
            return (self._of(process.transfer_engine.agent.name),)

        monkeypatch.setattr(WorkerProcess, "processes", property(processes))

    def _of(self, replica_id: str) -> ProcessId:
        if replica_id not in self._children:
            child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
            known = process_id(child.pid)
            assert known is not None
            self._children[replica_id] = child, known
        return self._children[replica_id][1]

    def kill(self, replica_id: str) -> None:
        child, _ = self._children[replica_id]
        child.kill()
        child.wait()

    def kill_all(self) -> None:
        for replica_id in self._children:
            self.kill(replica_id)


class Loss:
    """Takes down the first of some workers that is about to run its n-th batch. Which it is depends on where
    the door has sent how much; that one of them gets there does not. The batch runs after the loss."""

    def __init__(self, workers: Sequence[Any], verb: str, num_batches: int, stand_ins: StandIns):
        self._stand_ins = stand_ins
        self._num_batches = num_batches
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.victim: Any = None
        for worker in workers:
            runner = worker.process.seat.engine.runner
            setattr(runner, verb, self._counted(worker, getattr(runner, verb)))

    def _counted(self, worker: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        batches = itertools.count(1)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(batches) == self._num_batches and self._is_first(worker):
                asyncio.run_coroutine_threadsafe(self._take_down(), self._loop).result(HANG_S)
            return run(*args, **kwargs)

        return counted

    def _is_first(self, worker: Any) -> bool:
        with self._lock:
            self.victim = self.victim or worker
            return self.victim is worker

    async def _take_down(self) -> None:
        """The victim's connections end, and it writes nothing any more, as when a process is killed."""
        network.kill(self.victim.replica_id)
        self._stand_ins.kill(self.victim.replica_id)
        shell = self.victim.process.shell
        for connection in list(shell.connections.values()):
            connection.abort()
        self._closing = asyncio.ensure_future(shell.aclose())
