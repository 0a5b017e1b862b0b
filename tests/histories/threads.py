"""The threads of a worker process, on the scheduler: an engine's loop, the transfer thread, pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import Grant
from kv_transfer.lease.events import LeaseEvent, TransferEvent
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.histories.scheduler import Scheduler, SimulatedProcess, SimulatedThread, SkewedClock

POLL_S = 0.25


class ThreadHost:
    """What threads need of the world."""

    scheduler: Scheduler
    delay_s: Callable[[], float]  # of a thread that is woken
    slow_s: Callable[[], float]  # of a disk, or of the preparation of an item


class TurnLoop:
    """As `StepLoop`."""

    def __init__(self, host: ThreadHost, thread: SimulatedThread, clock: SkewedClock, engine: Any):
        self.thread = thread
        self._host, self._clock, self._engine = host, clock, engine
        self._calls: deque[Callable[[], None]] = deque()
        self._next_at: float | None = None

    def call(self, function: Callable[..., None], *args: Any) -> None:
        self._calls.append(partial(function, *args))
        self._wake(self._host.scheduler.now + self._host.delay_s())

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def _wake(self, at: float) -> None:
        if self._next_at is None or at < self._next_at:
            self._next_at = at
            self._host.scheduler.at(at, self.thread, "", self._turn, at)

    def _turn(self, at: float) -> None:
        if at != self._next_at:
            return  # a sooner turn has replaced it
        self._next_at = None
        self._host.scheduler.step(self.thread.process)
        while self._calls:
            self._calls.popleft()()
        wait_s = self._engine.step()
        if wait_s is not None:
            self._wake(self._clock.virtual(self._clock.now() + wait_s) + 0.0002)


class SimulatedTransferEngine(TransferEngine):
    """Calls `on_wake` where the product's wakes its thread, and records which grants are open."""

    on_wake: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        agent: Any,
        clock: SkewedClock,
        on_event: Callable[[TransferEvent], None],
        *,
        incoming: BlockMemory | None,
        **others: Any,
    ):
        self.incoming = incoming  # the memory that others write into
        self.open_grants: dict[str, Grant] = {}  # by lease
        self._on_end = on_event
        super().__init__(agent, clock, self._note_end, incoming=incoming, **others)

    def grant(self, lease_id: str, *args: Any) -> Grant:
        grant = self.open_grants[lease_id] = super().grant(lease_id, *args)
        return grant

    def _note_end(self, event: TransferEvent) -> None:
        if isinstance(event, LeaseEvent):
            self.open_grants.pop(event.lease_id)
        self._on_end(event)

    def _wake(self) -> None:
        super()._wake()
        self.on_wake()


class TransferTurns:
    """The transfer thread."""

    def __init__(self, host: ThreadHost, thread: SimulatedThread):
        self.engine: TransferEngine
        self._host, self._thread = host, thread
        self._next_at: float | None = None

    def wake(self) -> None:
        self._wake(self._host.scheduler.now + self._host.delay_s())

    def _wake(self, at: float) -> None:
        if self._next_at is None or at < self._next_at:
            self._next_at = at
            self._host.scheduler.at(at, self._thread, "", self._turn, at)

    def _turn(self, at: float) -> None:
        if at != self._next_at:
            return
        self._next_at = None
        self.engine.step()
        if self.engine.num_open:
            self._wake(self._host.scheduler.now + POLL_S)


class SimulatedExecutor(Executor):
    """Threads of a pool, each job with a time of its own; `is_serial`: one thread."""

    def __init__(self, host: ThreadHost, process: SimulatedProcess, name: str, *, is_serial: bool = False):
        self._host, self._process, self._name, self._is_serial = host, process, name, is_serial
        self._thread = SimulatedThread(process, name)
        self._free_at = 0.0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        thread = self._thread if self._is_serial else SimulatedThread(self._process, self._name)
        at = self._host.scheduler.now + self._host.slow_s()
        if self._is_serial:
            at = self._free_at = max(at, self._free_at)
        self._host.scheduler.at(at, thread, "", self._run, future, partial(function, *args, **kwargs))
        return future

    def _run(self, future: Future[Any], job: Callable[[], Any]) -> None:
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
