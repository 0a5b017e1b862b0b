"""Virtual time: what is to happen, in order of its instant, then of its being planned. One thread; no clock
is read."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventLoop:
    """`now` is the instant of the event that runs, in seconds from the start of the run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._num_planned = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """`when` lies not before `now`; calls of one instant run in the order in which they were planned."""
        self._num_planned += 1
        heappush(self._heap, (when, self._num_planned, call, args))

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    def run(self, until: float = float("inf")) -> None:
        """Runs until nothing is planned any more, or nothing before `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heappop(heap)
            self.num_run += 1
            call(*args)
