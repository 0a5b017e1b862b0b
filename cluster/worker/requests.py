"""The requests that one language engine knows, by id, and the time that each of them may wait.

An entry exists from the engine's `start` until the request has left the engine. Used on the engine's thread
only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol, TypeVar

from cluster.clock import Clock
from cluster.worker.outbox import DoorId


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


class TrackedRequest(Protocol):
    @property
    def request_id(self) -> str: ...

    @property
    def door(self) -> DoorId: ...

    @property
    def is_closing(self) -> bool:
        """The request is over for its door. It stays in the table until an open transfer has ended."""
        ...


R = TypeVar("R", bound=TrackedRequest)


class RequestTable(dict[str, R]):
    """`deadlines`: by request id. The id of a request that has ended expires, too, and is ignored then."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.deadlines = Deadlines(clock)

    def add(self, request: R) -> None:
        self[request.request_id] = request

    def remove(self, request_id: str) -> None:
        del self[request_id]

    def live(self, request_id: str) -> R | None:
        """The request, unless it is unknown, has ended or is closing."""
        request = self.get(request_id)
        return None if request is None or request.is_closing else request

    def of_door(self, door: DoorId) -> list[str]:
        """Ids of the door's requests, in order of arrival."""
        return [request_id for request_id, request in self.items() if request.door == door]
