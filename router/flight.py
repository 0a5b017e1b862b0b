"""One request's way through encode, prefill and decode, as its door sees it.

    launch   place it; tell decode, prefill and the encoders at the same time
    pass on  decode's grant to prefill, prefill's grants to the encoders
    yield    prefill's first token, then decode's tokens
    land     whatever happened, every stage that may still hold something is told to let go

`Dispatcher.generate` is that story; everything else here moves messages to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from cluster.config.settings import DoorArgs
from cluster.errors import ClusterError, MediaError, UnavailableError, from_info
from cluster.media.settings import item_name
from cluster.types.media import MediaItem
from cluster.types.members import Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    EncodeTarget,
    Failed,
    FeatureGranted,
    FinishReason,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from router.members import MemberTable, Peer
from router.policy import LeastWorkPolicy, RequestView, WorkerView

CallDecode = Callable[
    [str, str], Awaitable[None]
]  # (replica id, request id): the one Serve call of a request


class Flight:
    """State of one request at the door. Events arrive in order: prefill's token first, whoever's frame came first."""

    def __init__(self, request: GenerateRequest, encoders: list[Peer], prefill: Peer, decode: Peer):
        self.request = request
        self.encoders = encoders  # per media item
        self.prefill = prefill
        self.decode = decode
        self.num_cached_tokens = 0
        self.has_first_token = False
        self.has_decode_spoken = False
        self.has_landed = False
        self.ended_at: Peer | None = None  # whose event carried the finish reason
        self._charges: list[tuple[Peer, int]] = []  # predicted work not known to be done
        self._early: list[TokenEvent] = []  # decode's, if they overtook prefill's
        self._events: asyncio.Queue[TokenEvent | ClusterError] = asyncio.Queue()

    @property
    def peers(self) -> list[Peer]:
        return [*dict.fromkeys([self.decode, self.prefill, *self.encoders])]

    def needs(self, peer: Peer) -> bool:
        """Whether the answer still depends on a worker: on encoders until the first token, on prefill until decode has
        the KV. A worker that gives up or is lost later costs the client nothing."""
        if peer is self.decode:
            return True
        if peer is self.prefill:
            return not self.has_decode_spoken
        return peer in self.encoders and not self.has_first_token

    def charge(self, peer: Peer, num_units: int) -> None:
        """Count work that is on its way to a worker, so that the next request sees it before the worker reports it."""
        peer.num_predicted_units += num_units
        self._charges.append((peer, num_units))

    def discharge(self, *, keep: Peer | None = None) -> None:
        """The work is done (except what `keep` still does)."""
        for peer, num_units in self._charges:
            if peer is not keep:
                peer.num_predicted_units -= num_units
        self._charges = [charge for charge in self._charges if charge[0] is keep]

    def on_tokens(self, peer: Peer, event: TokenEvent) -> None:
        if event.finish_reason is FinishReason.CANCELLED:
            return
        if event.finish_reason is not None:
            self.ended_at = peer
        self.has_decode_spoken |= peer is self.decode
        if peer is self.prefill and not self.has_first_token:
            self.has_first_token = True
            self.num_cached_tokens = event.num_cached_tokens
            self.discharge(keep=self.decode)
            for known in [event, *self._early]:
                self._events.put_nowait(known)
        elif not self.has_first_token:
            self._early.append(event)
        else:
            self._events.put_nowait(event)

    def fail(self, error: ClusterError) -> None:
        self._events.put_nowait(error)

    async def next_event(self, deadline: float) -> TokenEvent:
        """Waits until `deadline`, on the event loop's clock, at most; raises what ended the request."""
        try:
            async with asyncio.timeout_at(deadline):
                event = await self._events.get()
        except TimeoutError:
            raise UnavailableError("the request ran out of time") from None
        if isinstance(event, ClusterError):
            raise event
        return event


class Dispatcher:
    """All of a door's flights. Lives on the door's event loop; is the listener of the member table."""

    def __init__(self, policy: LeastWorkPolicy, call_decode: CallDecode, timeouts: DoorArgs, block_size: int):
        self._policy = policy
        self._call_decode = call_decode
        self._timeouts = timeouts
        self._block_size = block_size
        self._flights: dict[str, Flight] = {}
        self._calls: set[asyncio.Future[None]] = set()
        self.members: MemberTable | None = None  # set once by the door, which builds both

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    async def generate(
        self, request: GenerateRequest, items: Sequence[MediaItem], block_hashes: Sequence[bytes]
    ) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of one choice; the last event has a finish reason. Raises ClusterError. Closing it cancels."""
        started_at = asyncio.get_running_loop().time()
        flight = self._place(request, items, block_hashes)
        try:
            self._launch(flight, items)
            event = await flight.next_event(started_at + self._timeouts.first_token_timeout_s)
            while event.finish_reason is None:
                yield event
                event = await flight.next_event(started_at + self._timeouts.request_timeout_s)
            yield event
        finally:
            self._land(flight)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                flight = self._flights.get(event.request_id)
                if flight is not None:
                    flight.on_tokens(peer, event)
            return
        flight = self._flights.get(getattr(message, "request_id", ""))
        if flight is None:
            if isinstance(message, DecodeGranted | FeatureGranted):
                peer.send(ReturnGrant(message.grant.lease_id))  # landed; nobody was given it
        elif isinstance(message, DecodeGranted):
            flight.prefill.send(DecodeTarget(message.request_id, message.grant))
        elif isinstance(message, FeatureGranted):
            target = EncodeTarget(message.request_id, message.item_idx, message.grant)
            flight.encoders[message.item_idx].send(target)
        elif isinstance(message, Failed) and flight.needs(peer):
            flight.fail(_named(flight, message))
        # Encoded needs no answer: prefill has been told by the encoder's own notification.

    def on_lost(self, peer: Peer) -> None:
        self._policy.forget(peer.member.replica_id)
        for flight in list(self._flights.values()):
            if flight.needs(peer):
                flight.fail(UnavailableError(f"the {peer.member.role} worker was lost", retry_after_s=1.0))

    def _place(self, request: GenerateRequest, items: Sequence[MediaItem], hashes: Sequence[bytes]) -> Flight:
        assert self.members is not None
        media = tuple((item.media_hash, item.geometry.num_tokens) for item in items)
        view = RequestView(len(request.prompt.token_ids), self._block_size, hashes, media)
        views = {role: [_view(peer) for peer in self.members.candidates(role)] for role in Role}
        placement = self._policy.place(view, views[Role.ENCODE], views[Role.PREFILL], views[Role.DECODE])
        return Flight(
            request,
            [self.members.peer(replica_id) for replica_id in placement.encoders],
            self.members.peer(placement.prefill),
            self.members.peer(placement.decode),
        )

    def _launch(self, flight: Flight, items: Sequence[MediaItem]) -> None:
        request = flight.request
        self._flights[request.request_id] = flight
        for peer in flight.peers:
            peer.num_flights += 1
        num_prompt_tokens = len(request.prompt.token_ids)
        flight.charge(flight.decode, 1)
        flight.charge(flight.prefill, num_prompt_tokens)
        timeout_s = self._timeouts.first_token_timeout_s
        start = StartDecode(request.request_id, num_prompt_tokens, request.sampling, request.stop, timeout_s)
        flight.decode.send(start)
        flight.prefill.send(StartPrefill(request, timeout_s))
        for item_idx, (peer, item) in enumerate(zip(flight.encoders, items, strict=True)):
            flight.charge(peer, item.geometry.num_tokens)
            peer.send(StartEncode(request.request_id, item_idx, item, timeout_s))
        call = asyncio.ensure_future(self._call_decode(flight.decode.member.replica_id, request.request_id))
        self._calls.add(call)
        call.add_done_callback(lambda done: self._on_call_done(flight, done))

    def _on_call_done(self, flight: Flight, call: asyncio.Future[None]) -> None:
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None and not flight.has_landed:
            flight.fail(
                UnavailableError(f"the decode worker refused the request: {error}", retry_after_s=1.0)
            )

    def _land(self, flight: Flight) -> None:
        """Every stage that may still hold something lets go. An answer that decode has ended is over at prefill, too; one
        that prefill has ended waits there for this Cancel, and an encoder may be left with an item that prefill found in
        its prefix cache."""
        del self._flights[flight.request.request_id]
        flight.has_landed = True
        flight.discharge()
        ended = [flight.prefill, flight.decode] if flight.ended_at is flight.decode else []
        assert self.members is not None
        for peer in flight.peers:
            if peer not in ended:
                peer.send(Cancel(flight.request.request_id))
            peer.num_flights -= 1
            self.members.close_if_drained(peer)


def _view(peer: Peer) -> WorkerView:
    return WorkerView(peer.member.replica_id, peer.num_queued_units)


def _named(flight: Flight, message: Failed) -> ClusterError:
    error = from_info(message.error)
    if isinstance(error, MediaError) and message.item_idx is not None:
        name = item_name(flight.request.prompt.media[message.item_idx].modality, message.item_idx)
        return MediaError(f"{name}: {error.message}", param="messages")
    return error
