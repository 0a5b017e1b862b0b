"""How long what an engine has been asked for may wait. Used on the engine's thread only."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from cluster.clock import Clock


class Deadlines:
    """A heap of (instant, key): O(log n) per change, nothing per step. If the wait for a key has ended, the
    key is yielded nevertheless, and its owner ignores it."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._heap: list[tuple[float, str]] = []

    def add(self, key: str, timeout_s: float) -> None:
        heapq.heappush(self._heap, (self._clock.now() + timeout_s, key))

    def expired(self) -> Iterator[str]:
        """Keys whose time is over, each once."""
        now = self._clock.now()
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    def wait_s(self) -> float | None:
        """Seconds until the next deadline. None: there is none."""
        if not self._heap:
            return None
        return max(0.001, self._heap[0][0] - self._clock.now())
