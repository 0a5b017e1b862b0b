"""Does equal work only once if several callers want it at the same time.

Life of a flight: the first caller starts it, others join, and all get its result or its error. A cancelled
caller does not affect the others; when the last caller is cancelled, the work is cancelled. Belongs to one
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from cluster.errors import UnavailableError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _SharedCall(Generic[Value]):
    def __init__(self, task: asyncio.Task[Value]):
        self.task = task
        self.num_waiting = 0


class SingleFlight(Generic[Key, Value]):
    def __init__(self) -> None:
        self._flights: dict[Key, _SharedCall[Value]] = {}  # flights that may be joined
        self._tasks: set[asyncio.Task[Value]] = set()  # also of flights that are being cancelled
        self._is_closed = False

    async def join(self, key: Key, start: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """The result of `start()`, or of the running work for this key. Raises its error, or UnavailableError
        once closed."""
        if self._is_closed:
            raise UnavailableError("the server is shutting down")
        flight = self._flights.get(key) or self._start(key, start)
        flight.num_waiting += 1
        try:
            await asyncio.wait({flight.task})
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting:
                flight.task.cancel()
                self._forget(key, flight)
        if flight.task.cancelled():
            raise UnavailableError("the server is shutting down")
        return flight.task.result()

    async def aclose(self) -> None:
        """Cancels running work and waits for its end. May be repeated."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, key: Key, start: Callable[[], Coroutine[Any, Any, Value]]) -> _SharedCall[Value]:
        flight = self._flights[key] = _SharedCall(asyncio.create_task(start()))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda task: self._ended(key, flight))
        return flight

    def _ended(self, key: Key, flight: _SharedCall[Value]) -> None:
        self._tasks.discard(flight.task)
        self._forget(key, flight)
        if not flight.task.cancelled():
            flight.task.exception()  # marks it as retrieved, in case no caller waits any more

    def _forget(self, key: Key, flight: _SharedCall[Value]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
