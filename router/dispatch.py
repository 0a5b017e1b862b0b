"""One request's way through encode, prefill and decode, as its door sees it.

    launch   place it; tell prefill and the encoders at the same time, decode as soon as prefill has the memory
    pass on  decode's grant to prefill, prefill's grants to the encoders (`router.encoding`)
    yield    per choice: prefill's first token, then decode's tokens
    land     whatever happened, every stage that may still hold something is told to let go

A request that decode preempts lands, too; each of its unfinished choices flies on as a request of its own, whose prompt
contains what has been generated (`TokenStream`). The client notices a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from cluster.config.settings import DoorArgs
from cluster.errors import ClusterError, RequestError, UnavailableError, from_info
from cluster.ids import new_request_id
from cluster.kvcache.hashing import block_hashes
from cluster.types.media import MediaItem
from cluster.types.members import Role
from cluster.types.messages import (
    Admitted,
    AnyMessage,
    CacheChanged,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Failed,
    FeatureGranted,
    FeatureShared,
    Preempted,
    ReturnGrant,
    StartDecode,
    StartPrefill,
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from router.encoding import EncodeStage
from router.flight import Flight
from router.members import MemberTable, Peer
from router.policy import LeastWorkPolicy, RequestView, WorkerView

CallDecode = Callable[
    [str, str], Awaitable[None]
]  # (replica id, request id): the one Serve call of a request


class _Launch:
    """A request that flies as soon as somebody reads one of its choices."""

    def __init__(self, dispatcher: Dispatcher, request: GenerateRequest, items: Sequence[MediaItem]):
        self._dispatcher = dispatcher
        self._request = request
        self._items = items
        self._closed: list[int] = []
        self._flight: Flight | None = None

    def flight(self, hashes: Sequence[bytes]) -> Flight:
        if self._flight is None:
            self._flight = self._dispatcher.launch(self._request, self._items, hashes)
            for choice_idx in self._closed:
                self._dispatcher.close(self._flight, choice_idx)
        return self._flight

    def close(self, choice_idx: int) -> None:
        if self._flight is None:
            self._closed.append(choice_idx)
        else:
            self._dispatcher.close(self._flight, choice_idx)


class TokenStream:
    """Token events of one choice; the last one has a finish reason. Raises ClusterError. One reader. It must be closed,
    unless it has ended or raised."""

    def __init__(
        self, dispatcher: Dispatcher, launch: _Launch, choice_idx: int, hashes: Sequence[bytes], timeouts: DoorArgs
    ):  # fmt: skip
        self._dispatcher = dispatcher
        self._launch = launch
        self._choice_idx = choice_idx
        self._hashes = hashes
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
        if self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        timeouts = self._timeouts
        limit_s = timeouts.request_timeout_s if self._has_first_token else timeouts.first_token_timeout_s
        while True:
            flight = self._launch.flight(self._hashes)
            event = await flight.next_event(self._choice_idx, self._started_at + limit_s)
            if isinstance(event, TokenEvent):
                return event
            self._resume(flight)

    def _resume(self, flight: Flight) -> None:
        """The rest of this choice, as a request of its own."""
        assert self._started_at is not None
        waited_s = asyncio.get_running_loop().time() - self._started_at
        request = flight.request.resumed(new_request_id(), self._choice_idx, self._token_ids, waited_s)
        self._launch.close(self._choice_idx)
        self._launch = _Launch(self._dispatcher, request, flight.items)
        self._hashes = block_hashes(request.prompt, self._dispatcher.block_size)
        self._choice_idx, self._token_ids = 0, ()


class Dispatcher:
    """All of a door's flights. Lives on the door's event loop; is the listener of the member table."""

    def __init__(self, policy: LeastWorkPolicy, call_decode: CallDecode, timeouts: DoorArgs, block_size: int):
        self._policy = policy
        self._call_decode = call_decode
        self._timeouts = timeouts
        self.block_size = block_size
        self._encode = EncodeStage(self._next_encoder, timeouts.first_token_timeout_s)
        self._flights: dict[str, Flight] = {}
        self._calls: set[asyncio.Future[None]] = set()
        self.members: MemberTable | None = None  # set once by the door, which builds both

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    def generate(
        self, request: GenerateRequest, items: Sequence[MediaItem], hashes: Sequence[bytes]
    ) -> list[TokenStream]:
        """One stream per choice. Nothing is sent before the first of them is read; every one must be closed."""
        launch = _Launch(self, request, items)
        return [
            TokenStream(self, launch, choice_idx, hashes, self._timeouts)
            for choice_idx in range(len(request.sampling))
        ]

    def launch(self, request: GenerateRequest, items: Sequence[MediaItem], hashes: Sequence[bytes]) -> Flight:
        """Raises ClusterError; then nothing is left."""
        flight = self._place(request, items, hashes)
        self._flights[request.request_id] = flight
        try:
            self._send_all(flight)
        except ClusterError:
            self._land(flight)
            raise
        return flight

    def close(self, flight: Flight, choice_idx: int) -> None:
        """Nobody reads this choice any more."""
        flight.open_choices.discard(choice_idx)
        if flight.has_landed:
            return
        if not flight.open_choices:
            self._land(flight)
        elif not flight.is_finished(choice_idx):
            flight.decode.send(Cancel(flight.request.request_id, choice_idx))

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                flight = self._flights.get(event.request_id)
                if flight is not None:
                    flight.on_tokens(peer, event)
            return
        if isinstance(message, CacheChanged):
            self._policy.media_changed(peer.member.replica_id, message.added, message.evicted)
            return
        flight = self._flights.get(getattr(message, "request_id", ""))
        if flight is None:
            if isinstance(message, DecodeGranted | FeatureGranted):
                peer.send(ReturnGrant(message.grant.lease_id))  # landed; nobody was given it
        elif isinstance(message, Admitted):
            self._start_decode(flight)
        elif isinstance(message, DecodeGranted):
            flight.prefill.send(DecodeTarget(message.request_id, message.grant))
        elif isinstance(message, FeatureGranted):
            self._encode.on_granted(flight, message)
        elif isinstance(message, FeatureShared):
            self._encode.on_shared(flight, message.item_idx)
        elif isinstance(message, Preempted):
            flight.on_preempted()
        elif isinstance(message, Failed) and peer.member.role is Role.ENCODE:
            self._encode.on_failed(flight, peer, message)
        elif isinstance(message, Failed) and flight.needs(peer):
            flight.fail(from_info(message.error))
        # Encoded needs no answer: prefill has been told by the encoder's own notification.

    def on_lost(self, peer: Peer) -> None:
        self._policy.forget(peer.member.replica_id)
        for flight in list(self._flights.values()):
            if peer.member.role is Role.ENCODE:
                self._encode.on_lost(flight, peer)
            elif flight.needs(peer):
                flight.fail(UnavailableError(f"the {peer.member.role} worker was lost", retry_after_s=1.0))

    def _place(self, request: GenerateRequest, items: Sequence[MediaItem], hashes: Sequence[bytes]) -> Flight:
        assert self.members is not None
        media = tuple((item.media_hash, item.geometry.num_tokens) for item in items)
        returning = [i.media_hash for i in items if i.is_returning or self._policy.has_media(i.media_hash)]
        view = RequestView(len(request.prompt.token_ids), self.block_size, hashes, media)
        placement = self._policy.place(
            view,
            self._able_to_hold(Role.ENCODE, 0),
            self._able_to_hold(Role.PREFILL, request.num_prompt_blocks(self.block_size)),
            self._able_to_hold(Role.DECODE, request.max_blocks(self.block_size)),
        )
        return Flight(
            request,
            items,
            [self.members.peer(replica_id) for replica_id in placement.encoders],
            self.members.peer(placement.prefill),
            self.members.peer(placement.decode),
            frozenset(returning),
        )

    def _able_to_hold(self, role: Role, num_blocks: int) -> list[WorkerView]:
        """Raises RequestError if no worker of the pool has memory for a request of this size."""
        assert self.members is not None
        peers = self.members.candidates(role)
        able = [peer for peer in peers if peer.member.num_blocks >= num_blocks]
        if peers and not able:
            largest = max(peer.member.num_blocks for peer in peers) * self.block_size
            raise RequestError(
                f"the request needs {num_blocks * self.block_size} tokens of KV cache; a {role} worker holds {largest}"
            )
        return [_view(peer) for peer in able]

    def _send_all(self, flight: Flight) -> None:
        request = flight.request
        for peer in flight.peers:
            peer.num_flights += 1
        flight.charge(flight.decode, len(request.sampling) * len(request.prompts))
        flight.charge(flight.prefill, sum(len(prompt.token_ids) for prompt in request.prompts))
        flight.prefill.send(StartPrefill(request, self._timeouts.first_token_timeout_s))
        self._encode.start(flight)

    def _next_encoder(self, flight: Flight, item_idx: int, last: Peer) -> Peer:
        """Who encodes an item after `last` has not: the best of the others."""
        assert self.members is not None
        others = [peer for peer in self.members.candidates(Role.ENCODE) if peer is not last]
        item = flight.items[item_idx]
        views = [_view(peer) for peer in others]
        return self.members.peer(self._policy.place_item(item.media_hash, item.geometry.num_tokens, views))

    def _start_decode(self, flight: Flight) -> None:
        request = flight.request
        flight.decode.send(StartDecode(request, self._timeouts.first_token_timeout_s))
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
        """Every stage that may still hold something lets go. A request that is over at decode is over at prefill, too; one
        that prefill has ended waits there for this Cancel, and an encoder may be left with an item that prefill found in
        its prefix cache."""
        del self._flights[flight.request.request_id]
        flight.has_landed = True
        flight.discharge()
        ended = [flight.prefill, flight.decode] if flight.is_over_at_decode else []
        assert self.members is not None
        for peer in flight.peers:
            if peer not in ended:
                peer.send(Cancel(flight.request.request_id))
            peer.num_flights -= 1
            self.members.close_if_drained(peer)


def _view(peer: Peer) -> WorkerView:
    return WorkerView(peer.member.replica_id, peer.num_queued_units)
