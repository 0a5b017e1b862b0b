"""Virtual time: what is to happen, in order of its instant, then of its being planned; and the clock that
simulated workers read. One thread; no real clock is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any


class EventLoop:
    """`now` is the instant of the event that runs, in seconds from the start of the run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._num_planned = 0
        self._is_stopped = False
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """`when` lies not before `now`; calls of one instant run in the order in which they were planned."""
        self._num_planned += 1
        heappush(self._heap, (when, self._num_planned, call, args))

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    def stop(self) -> None:
        """Nothing that is planned runs any more."""
        self._is_stopped = True

    def run(self, until: float = float("inf")) -> None:
        """Runs until nothing is planned any more, or nothing before `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until and not self._is_stopped:
            self.now, _, call, args = heappop(heap)
            self.num_run += 1
            call(*args)


class VirtualClock:
    """The clock of all workers of a simulation.

    A model's call takes virtual time, but runs in one event. Code inside `at` spends its time on the clock
    (`spend`): what it reads, and what it plans for others, belongs to the instant that it has come to. The
    worker must not run again before that instant; others, whose events are earlier, may."""

    def __init__(self, loop: EventLoop):
        self._loop = loop
        self._ahead_s = 0.0

    def now(self) -> float:
        return self._loop.now + self._ahead_s

    def spend(self, seconds: float) -> None:
        """The code that runs has taken so long more."""
        self._ahead_s += seconds

    @contextmanager
    def at(self, instant: float) -> Iterator[None]:
        """The block begins at this instant, which may lie before the event's."""
        self._ahead_s = instant - self._loop.now
        try:
            yield
        finally:
            self._ahead_s = 0.0

    def plan(self, call: Callable[..., object], *args: Any) -> None:
        """The call happens at this clock's instant."""
        self._loop.at(self.now(), call, *args)
