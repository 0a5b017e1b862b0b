"""Virtual time, and the order in which everything happens: one heap of events.

An event belongs to a thread of a simulated process, or to none (the network, the control plane). What the
process is decides whether its events happen:

    dead       its events are dropped
    stopped    its events are held, and happen in their order when it continues (SIGSTOP, SIGCONT)
    a busy thread holds its events until it is free

A thread is busy while its call lets time pass (`pass_time`: a model step, a write that the kernel delays).
Everything else goes on meanwhile, inside that call, so this is the one place where calls nest. If the process
dies there, `ProcessEnded` unwinds the call.

Nothing here draws a random number: events at one instant happen in the order in which they were scheduled.
One Python thread runs everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any


class ProcessEnded(BaseException):
    """The process was killed while the call let time pass. No product code may catch it."""


@dataclass(eq=False)
class SimulatedProcess:
    """What is killed, stopped and continued as a whole."""

    name: str
    is_dead: bool = False
    is_stopped: bool = False
    num_stops: int = 0
    held: list[Event] = field(default_factory=list)  # that came while the process was stopped


@dataclass(eq=False)
class SimulatedThread:
    process: SimulatedProcess
    name: str
    is_busy: bool = False
    held: deque[Event] = field(default_factory=deque)  # that came while the thread was busy

    def __str__(self) -> str:
        return f"{self.process.name}.{self.name}"


@dataclass(eq=False, slots=True)
class Event:
    at: float
    thread: SimulatedThread | None  # None: it happens whatever runs
    label: str  # what the trace says; empty: not traced
    call: Callable[..., Any]
    args: tuple[Any, ...]


class SkewedClock:
    """The clock of one process: another zero and another speed than the virtual time has."""

    def __init__(self, scheduler: Scheduler, offset_s: float = 0.0, rate: float = 1.0):
        self._scheduler, self._offset_s, self._rate = scheduler, offset_s, rate

    def now(self) -> float:
        return self._offset_s + self._scheduler.now * self._rate

    def virtual(self, at: float) -> float:
        """The virtual instant of an instant of this clock."""
        return (at - self._offset_s) / self._rate


class Scheduler:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.num_steps = 0  # protocol steps so far: messages, transfers, turns of engines
        self.trace: list[tuple[float, str, str]] = []  # (when, thread, what)
        self.before_step: Callable[[int], None] = lambda nth: None  # called with the number of the step
        self.after_event: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, int, Event]] = []
        self._num_scheduled = 0

    def at(
        self,
        when: float,
        thread: SimulatedThread | None,
        label: str,
        call: Callable[..., Any],
        *args: Any,
    ) -> None:
        self._num_scheduled += 1
        event = Event(max(when, self.now), thread, label, call, args)
        heappush(self._heap, (event.at, self._num_scheduled, event))

    def after(
        self,
        delay_s: float,
        thread: SimulatedThread | None,
        label: str,
        call: Callable[..., Any],
        *args: Any,
    ) -> None:
        self.at(self.now + delay_s, thread, label, call, *args)

    def note(self, who: str, what: str) -> None:
        self.trace.append((self.now, who, what))

    def step(self, process: SimulatedProcess) -> None:
        """The next step of the protocols is about to happen in this process. Raises ProcessEnded."""
        self.num_steps += 1
        self.before_step(self.num_steps)
        if process.is_dead:
            raise ProcessEnded

    # Running

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> bool:
        """False: nothing is scheduled."""
        if not self._heap:
            return False
        when, _, event = heappop(self._heap)
        self.now = max(self.now, when)
        self._happen(event)
        return True

    def run_until(self, limit: float) -> None:
        while self._heap and self._heap[0][0] <= limit:
            self.run_next()
        self.now = max(self.now, limit)

    def pass_time(self, thread: SimulatedThread, seconds: float) -> None:
        """The thread, whose event is happening, is busy for so long. Raises ProcessEnded."""
        process = thread.process
        self.run_until(self.now + seconds)
        while process.is_stopped and not process.is_dead:
            if not self.run_next():
                raise AssertionError(f"{process.name} is stopped for ever")
        if process.is_dead:
            raise ProcessEnded

    def _happen(self, event: Event) -> None:
        thread = event.thread
        if thread is None:
            return self._call(event)
        process = thread.process
        if process.is_dead:
            return
        if process.is_stopped:
            process.held.append(event)
        elif thread.is_busy:
            thread.held.append(event)
        else:
            self._run(thread, event)
            while thread.held and not process.is_stopped and not process.is_dead:
                self._run(thread, thread.held.popleft())

    def _run(self, thread: SimulatedThread, event: Event) -> None:
        thread.is_busy = True
        try:
            self._call(event)
        except ProcessEnded:
            pass
        finally:
            thread.is_busy = False

    def _call(self, event: Event) -> None:
        if event.label:
            self.trace.append((self.now, "" if event.thread is None else str(event.thread), event.label))
        self.num_events += 1
        event.call(*event.args)
        self.after_event()

    # Processes

    def kill(self, process: SimulatedProcess) -> None:
        process.is_dead, process.is_stopped = True, False
        process.held.clear()

    def stop(self, process: SimulatedProcess) -> None:
        process.is_stopped = True
        process.num_stops += 1

    def resume(self, process: SimulatedProcess) -> None:
        """What came meanwhile happens now, in order, also if one of these events lasts."""
        if process.is_dead or not process.is_stopped:
            return
        process.is_stopped = False
        held, process.held = process.held, []
        for event in held:
            self.at(self.now, event.thread, event.label, event.call, *event.args)
