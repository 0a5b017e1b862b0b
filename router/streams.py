"""The reader's side of a request: each choice is a stream of token events."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from cluster.errors import ClusterError
from cluster.types.messages import TokenEvent


class StreamOwner(Protocol):
    """What streams ask of the dispatcher."""

    def submit(self, request_id: str) -> None:
        """The first choice of the request is read. May be repeated."""
        ...

    def close(self, request_id: str, choice_idx: int) -> None: ...


class TokenStream:
    """Token events of one choice; the last one has a finish reason. Raises ClusterError. One reader. A stream
    that has not ended or raised must be closed. The request is submitted when one of its streams is first
    read."""

    def __init__(self, owner: StreamOwner, request_id: str, choice_idx: int):
        self._owner = owner
        self._request_id = request_id
        self._choice_idx = choice_idx
        self._events: deque[TokenEvent | ClusterError] = deque()
        self._arrival: asyncio.Future[None] | None = None  # the reader waits for it
        self._is_submitted = False
        self.is_closed = False

    @property
    def has_next(self) -> bool:
        """Whether tokens are there: reading on does not wait, and raises no ClusterError."""
        return bool(self._events) and not self.is_closed and isinstance(self._events[0], TokenEvent)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.is_closed:
            raise StopAsyncIteration
        if not self._is_submitted:
            self._is_submitted = True
            self._owner.submit(self._request_id)
        try:
            if not self._events:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            event = self._events.popleft()
            if isinstance(event, ClusterError):
                raise event
        except BaseException:  # also when the reader is cancelled
            self._close()
            raise
        if event.finish_reason is not None:
            self._close()
        return event

    def put(self, event: TokenEvent | ClusterError) -> None:
        """What the reader gets next."""
        self._events.append(event)
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():  # done: the reader was cancelled
            arrival.set_result(None)

    async def aclose(self) -> None:
        """May be repeated, and may come before the first event."""
        self._close()

    def _close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._owner.close(self._request_id, self._choice_idx)
