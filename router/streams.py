"""The reader's side of a request: each choice is a stream of token events."""

from __future__ import annotations

import asyncio
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
        self._events: asyncio.Queue[TokenEvent | ClusterError] = asyncio.Queue()
        self.is_closed = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.is_closed:
            raise StopAsyncIteration
        self._owner.submit(self._request_id)
        try:
            event = await self._events.get()
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
        self._events.put_nowait(event)

    async def aclose(self) -> None:
        """May be repeated, and may come before the first event."""
        self._close()

    def _close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._owner.close(self._request_id, self._choice_idx)
