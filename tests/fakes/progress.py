"""A clock that goes as fast as the machine: it counts the events of all answers that are being read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


class Progress:
    def __init__(self) -> None:
        self._num_events = 0
        self._num_open = 0
        self._happened = asyncio.Event()

    def happens(self) -> None:
        """One event of one answer."""
        self._num_events += 1
        self._wake()

    async def pass_by(self, num_events: int) -> None:
        """Returns after so many events, or when no answer is being read any more."""
        until = self._num_events + num_events
        while self._num_events < until and self._num_open:
            await self._happened.wait()

    async def leave_after(self, num_events: int | None, read: Coroutine[object, object, None]) -> bool:
        """Runs `read`, the reader of one answer, and cancels it after so many events of all answers (None:
        never). Whether it came to its end."""
        async with self._reading():
            reading = asyncio.ensure_future(read)
            if num_events is not None:
                leaving = asyncio.ensure_future(self.pass_by(num_events))
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                if not reading.done():
                    reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.result()
            return not reading.cancelled()

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._wake()

    def _wake(self) -> None:
        self._happened.set()
        self._happened = asyncio.Event()
