"""The reader's side of a request: its choices as streams of token events, whatever becomes of the flights that bring them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from cluster.config.settings import DoorArgs
from cluster.errors import UnavailableError
from cluster.ids import new_request_id
from cluster.kvcache.hashing import block_hashes
from cluster.types.media import MediaItem
from cluster.types.messages import TokenEvent
from cluster.types.request import GenerateRequest
from router.flow.flight import Flight
from router.policy import Decision, RequestView
from router.telemetry.timeline import RequestTimeline


class Departures(Protocol):
    """What streams ask of the dispatcher."""

    block_size: int

    def enter(self, launch: Launch) -> asyncio.Future[None] | None: ...

    def launch(self, launch: Launch) -> Flight: ...

    def leave(self, launch: Launch) -> None: ...

    def close(self, flight: Flight, choice_idx: int) -> None: ...


class Launch:
    """A request that flies as soon as somebody reads one of its choices and it has been let in. Raises ClusterError then."""

    def __init__(
        self,
        departures: Departures,
        request: GenerateRequest,
        items: Sequence[MediaItem],
        hashes: Sequence[bytes],
        ledger: RequestTimeline,
        tenant: str,
        *,
        is_resumed: bool = False,
    ):
        """`hashes`: one per full block of the prompt. `is_resumed`: it was let in before."""
        self.request = request
        self.items = items
        self.hashes = hashes
        self.ledger = ledger
        self.tenant = tenant
        self.is_resumed = is_resumed
        self.view: RequestView | None = None  # what the policy sees of it, once it was asked
        self.decision: Decision | None = None  # as good as one made now
        self._departures = departures
        self._open_choices = set(range(len(request.sampling)))
        self._has_asked = False
        self._entrance: asyncio.Future[None] | None = None
        self._flight: Flight | None = None
        self._error: Exception | None = None

    async def flight(self) -> Flight:
        """For every choice the same one, or the same error."""
        if self._error is not None:
            raise self._error
        try:
            return await self._admitted_flight()
        except Exception as error:
            self._error = error
            raise

    async def _admitted_flight(self) -> Flight:
        if not self._has_asked:
            self._has_asked = True
            self._entrance = self._departures.enter(self)
        if self._entrance is not None:
            await asyncio.shield(self._entrance)  # other choices wait for it, too
        if self._flight is None:
            self._flight = self._departures.launch(self)
            for choice_idx in set(range(len(self.request.sampling))) - self._open_choices:
                self._departures.close(self._flight, choice_idx)
        return self._flight

    def close(self, choice_idx: int) -> None:
        """Nobody reads this choice any more."""
        self._open_choices.discard(choice_idx)
        if self._flight is not None:
            self._departures.close(self._flight, choice_idx)
        elif not self._open_choices and self._has_asked:
            self._departures.leave(self)


class TokenStream:
    """Token events of one choice; the last one has a finish reason. Raises ClusterError. One reader. It must be closed,
    unless it has ended or raised."""

    def __init__(self, departures: Departures, launch: Launch, choice_idx: int, timeouts: DoorArgs):
        self._departures = departures
        self._launch = launch
        self._choice_idx = choice_idx
        self._timeouts = timeouts
        self._token_ids: tuple[int, ...] = ()  # of the present flight
        self._started_at: float | None = None
        self._has_first_token = False
        self._is_closed = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            event = await self._next_event()
        except BaseException:  # also when the reader is cancelled
            self._close()
            raise
        self._token_ids += event.token_ids
        self._has_first_token = True
        if event.finish_reason is not None:
            self._close()
        return event

    async def aclose(self) -> None:
        """May be repeated, and may come before the first event."""
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._launch.close(self._choice_idx)

    async def _next_event(self) -> TokenEvent:
        flight = await self._launch.flight()  # admission ends its own waits
        if self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        timeouts = self._timeouts
        limit_s = timeouts.request_timeout_s if self._has_first_token else timeouts.first_token_timeout_s
        try:
            async with asyncio.timeout_at(self._started_at + limit_s):
                while not isinstance(event := await flight.next_event(self._choice_idx), TokenEvent):
                    self._resume(flight)
                    flight = await self._launch.flight()
                return event
        except TimeoutError:
            raise UnavailableError("the request ran out of time") from None

    def _resume(self, flight: Flight) -> None:
        """The rest of this choice, as a request of its own."""
        assert self._started_at is not None
        waited_s = asyncio.get_running_loop().time() - self._started_at
        request = flight.request.resumed(new_request_id(), self._choice_idx, self._token_ids, waited_s)
        hashes = block_hashes(request.prompt, self._departures.block_size)
        earlier = self._launch
        earlier.close(self._choice_idx)
        self._launch = Launch(
            self._departures, request, flight.items, hashes, earlier.ledger, earlier.tenant, is_resumed=True
        )
        self._choice_idx, self._token_ids = 0, ()
