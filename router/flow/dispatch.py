"""One request's way through encode, prefill and decode, as its door sees it.

    enter    predict what it will take; let it in, or have it wait, or refuse it (`router.admission.entrance`)
    launch   place it; tell prefill and the encoders at the same time, decode as soon as prefill has the memory; or decode alone,
             if it is to compute the prompt
    pass on  decode's grant to prefill, prefill's grants to the encoders (`router.flow.encoding`)
    yield    per choice: prefill's first token, then decode's tokens
    land     as soon as the last token of every choice has come, read or not, or the request has failed: its charges are freed, and
             every stage that may still hold something is told to let go

An error in here concerns one request: that request lands with an internal error, every other one goes on, and no connection ends.

A request that decode preempts lands, too; each of its unfinished choices flies on as a request of its own, whose prompt
contains what has been generated (`router.flow.streams`). The client notices a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from cluster.clock import Clock
from cluster.config.settings import DoorArgs
from cluster.errors import ClusterError, UnavailableError, from_info, to_known
from cluster.types.media import MediaItem
from cluster.types.members import Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Encoded,
    Failed,
    FeatureGranted,
    FeatureShared,
    GrantPassed,
    LoadReport,
    Preempted,
    PrefillAdmitted,
    ReturnGrant,
    Stalled,
    StartDecode,
    StartPrefill,
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from router.admission.entrance import Entrance
from router.flow.encoding import EncodeStage
from router.flow.flight import Flight
from router.flow.placing import Placing
from router.flow.quarantine import Quarantine, barred_item, barred_request, content_of
from router.flow.streams import Launch, TokenStream
from router.flow.watch import PeerWatch
from router.members import MemberTable, Peer
from router.policy import CalibrationStatistics, Decision
from router.telemetry.timeline import RequestTimeline

logger = logging.getLogger(__name__)

CallDecode = Callable[
    [str, str], Awaitable[None]
]  # (replica id, request id): the one Serve call of a request


class Dispatcher:
    """All of a door's flights. Lives on the door's event loop; is the listener of the member table."""

    def __init__(
        self, placing: Placing, entrance: Entrance, call_decode: CallDecode, timeouts: DoorArgs, clock: Clock
    ):
        self._placing = placing
        self._cluster = placing.cluster
        self._entrance = entrance
        self._call_decode = call_decode
        self._timeouts = timeouts
        self._clock = clock
        self.block_size = placing.block_size
        self.quarantine = Quarantine(clock)
        self._encode = EncodeStage(
            self._cluster,
            self._next_encoder,
            timeouts.first_token_timeout_s,
            self.quarantine,
            self._attempt,
        )
        self._flights: dict[str, Flight] = {}
        self._calls: set[asyncio.Future[None]] = set()
        self._watch = PeerWatch(clock, self._on_silence, self._on_long_silence)
        self.num_crashed = 0  # requests that an error of this door has ended
        self.members: MemberTable | None = None  # set once by the door, which builds both

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Requests that have not been let in yet."""
        return self._entrance.num_waiting

    @property
    def num_silences(self) -> int:
        """Times that a worker stopped moving, since the start."""
        return self._watch.num_silences

    @property
    def calibration(self) -> CalibrationStatistics:
        return self._cluster.calibration

    @property
    def is_idle(self) -> bool:
        return not self._flights and self._entrance.is_idle and self._cluster.is_idle

    def generate(
        self,
        request: GenerateRequest,
        items: Sequence[MediaItem],
        hashes: Sequence[bytes],
        ledger: RequestTimeline,
        tenant: str = "",
    ) -> list[TokenStream]:
        """One stream per choice. Nothing is sent before the first of them is read; every one must be closed."""
        launch = Launch(self, request, items, hashes, ledger, tenant)
        return [
            TokenStream(self, launch, choice_idx, self._timeouts)
            for choice_idx in range(len(request.sampling))
        ]

    def enter(self, launch: Launch) -> asyncio.Future[None] | None:
        """None: it may be launched. Else it waits for this future. Raises ClusterError."""
        if launch.is_resumed:
            return None
        try:
            self._check_barred(launch)
            self._report()
            class_name = self._entrance.class_name
            waiting = self._entrance.enter(self._placing.ticket(launch, class_name, self._clock.now()))
        except Exception as error:
            _tried(self.leave, launch)
            raise self._named(error) from error
        if waiting is not None:
            launch.decision = None  # it will be another cluster by then
        return waiting

    def _report(self) -> None:
        self._entrance.report(self._placing.capacity(), self._placing.reported())

    def leave(self, launch: Launch) -> None:
        """Nobody wants it any more, and it has not been launched."""
        self._entrance.leave(launch.request.request_id)

    def launch(self, launch: Launch) -> Flight:
        """Raises ClusterError; then nothing is left."""
        try:
            self._check_barred(launch)
            flight, decision = self._place(launch)
        except Exception as error:
            _tried(self.leave, launch)
            raise self._named(error) from error
        self._flights[flight.request.request_id] = flight
        for peer in flight.peers:
            peer.num_flights += 1
        self._watch.begin()
        try:
            self._placing.charge(launch, decision, self._clock.now())
            self._send_all(flight)
        except Exception as error:
            self._land(flight)
            raise self._named(error) from error
        return flight

    def close(self, flight: Flight, choice_idx: int) -> None:
        """Nobody reads this choice any more."""
        flight.open_choices.discard(choice_idx)
        if flight.has_landed:
            return
        if flight.is_over:
            self._land(flight)
        elif not flight.is_finished(choice_idx):
            self._attempt(flight, flight.decode.send, Cancel(flight.request.request_id, choice_idx))

    def on_joined(self, peer: Peer) -> None:
        self._placing.add(peer.member)
        self._watch.add(peer)
        self.quarantine.came_back(peer.member.replica_id)

    def on_listed(self, peer: Peer) -> None:
        _tried(self._cluster.set_listed, peer.member.replica_id, peer.is_listed)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        """What concerns no request first, and tokens, which are most of it. Raises nothing: it would end the connection."""
        self._watch.heard(peer)
        if isinstance(message, Tokens):
            if message.load is not None:
                _tried(self._on_load, peer, message.load)
            for event in message.events:
                flight = self._flights.get(event.request_id)
                if flight is not None:
                    try:
                        self._on_tokens(flight, peer, event)
                    except Exception as error:
                        self._crash(flight, error)
            return
        flight = self._flights.get(getattr(message, "request_id", ""))
        if flight is not None:
            self._attempt(flight, self._on_news, flight, peer, message)
        else:
            _tried(self._on_worker_news, peer, message)

    def _on_load(self, peer: Peer, load: LoadReport) -> None:
        self._cluster.reported(peer.member.replica_id, load, self._clock.now())
        if self._entrance.num_waiting:
            self._report()

    def _on_worker_news(self, peer: Peer, message: AnyMessage) -> None:
        """About no request that is here."""
        if isinstance(message, Stalled):
            self._watch.told(peer, bool(message.threads))
        elif isinstance(message, DecodeGranted | FeatureGranted):
            peer.send(ReturnGrant(message.grant.lease_id))  # landed; no writer was given it
        else:
            self._placing.news(peer.member.replica_id, message)

    def _on_silence(self, peer: Peer) -> None:
        """It does not move, or moves again."""
        self._cluster.set_silent(peer.member.replica_id, peer.is_silent)

    def _on_long_silence(self, peer: Peer) -> None:
        if peer.member.role is Role.ENCODE:
            for flight in list(self._flights.values()):
                self._attempt(flight, self._encode.on_silent, flight, peer)

    def _on_news(self, flight: Flight, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, PrefillAdmitted):
            self._start_decode(flight)
        elif isinstance(message, DecodeGranted) and flight.prefill is not None:
            flight.prefill.send(DecodeTarget(message.request_id, message.grant))
            peer.send(GrantPassed(message.grant.lease_id, flight.prefill.member.processes))
        elif isinstance(message, FeatureGranted):
            self._encode.on_granted(flight, message)
        elif isinstance(message, FeatureShared):
            self._encode.on_shared(flight, message.item_idx)
            self._item_done(flight, message.item_idx)
        elif isinstance(message, Encoded):  # prefill has been told by the encoder's own notification
            self._encode.on_encoded(flight, message.item_idx)
            flight.ledger.encoded(message.item_idx, message.timing, message.cached)
            self._cluster.item_done(message.request_id, message.item_idx, self._clock.now())
            self._item_done(flight, message.item_idx)
        elif isinstance(message, Preempted):
            flight.on_preempted()
        elif isinstance(message, Failed) and peer.member.role is Role.ENCODE:
            self._encode.on_failed(flight, peer, message)
        elif isinstance(message, Failed) and flight.needs(peer):
            flight.fail(from_info(message.error))
        if flight.is_over and not flight.has_landed:
            self._land(flight)

    def _on_tokens(self, flight: Flight, peer: Peer, event: TokenEvent) -> None:
        is_first = flight.num_tokens == 0
        flight.on_tokens(peer, event)
        if is_first and flight.num_tokens:
            self._placing.first_token(flight, event.timing, self._clock.now())
            self._entrance.done(event.request_id)
        if (event.finish_reason is not None or peer is flight.prefill) and flight.is_over:
            self._land(flight)

    def _item_done(self, flight: Flight, item_idx: int) -> None:
        flight.encoding.discard(item_idx)
        if not flight.encoding:
            self._entrance.encoded(flight.request.request_id)

    def on_lost(self, peer: Peer) -> None:
        self._watch.remove(peer)
        _tried(self._cluster.remove, peer.member.replica_id)
        for flight in list(self._flights.values()):
            self._attempt(flight, self._on_flight_lost, flight, peer)

    def _on_flight_lost(self, flight: Flight, peer: Peer) -> None:
        """A worker that may have a part in it is gone."""
        if peer.member.role is Role.ENCODE:
            self._encode.on_lost(flight, peer)
        elif flight.needs(peer):
            self.quarantine.lost(flight.content, peer.member.replica_id, flight.num_tokens)
            is_barred = self.quarantine.is_barred(flight.content)
            lost = UnavailableError(f"the {peer.member.role} worker was lost", retry_after_s=1.0)
            flight.fail(barred_request() if is_barred else lost)
        if flight.is_over and not flight.has_landed:
            self._land(flight)

    def _check_barred(self, launch: Launch) -> None:
        """Raises QuarantinedError."""
        if not self.quarantine:
            return
        for item_idx, item in enumerate(launch.items):
            if self.quarantine.is_barred(item.media_hash):
                raise barred_item(item, item_idx)
        if self.quarantine.is_barred(content_of(launch.request, launch.hashes, self.block_size)):
            raise barred_request()

    def _place(self, launch: Launch) -> tuple[Flight, Decision]:
        """Charges nothing."""
        assert self.members is not None
        admitted_at = self._clock.now()
        decision, returning = self._placing.place(launch, admitted_at)
        launch.ledger.launched(admitted_at, self._clock.now(), decision)
        placement = decision.placement
        flight = Flight(
            launch.request,
            launch.items,
            launch.ledger,
            [self.members.peer(replica_id) for replica_id in placement.encoders],
            None if placement.prefill is None else self.members.peer(placement.prefill),
            self.members.peer(placement.decode),
            placement.codec,
            returning,
            content_of(launch.request, launch.hashes, self.block_size),
        )
        return flight, decision

    def _send_all(self, flight: Flight) -> None:
        if flight.prefill is None:
            return self._start_decode(flight)
        flight.prefill.send(StartPrefill(flight.request, self._timeouts.first_token_timeout_s))
        self._encode.start(flight)

    def _next_encoder(self, flight: Flight, item_idx: int, last: Peer) -> Peer:
        """Who encodes an item after `last` has not: the best of the others."""
        assert self.members is not None
        now = self._clock.now()
        return self.members.peer(self._placing.next_encoder(flight, item_idx, last.member.replica_id, now))

    def _start_decode(self, flight: Flight) -> None:
        request = flight.request
        timeout_s = self._timeouts.first_token_timeout_s
        flight.decode.send(StartDecode(request, timeout_s, flight.prefill is None, flight.codec))
        call = asyncio.ensure_future(self._call_decode(flight.decode.member.replica_id, request.request_id))
        self._calls.add(call)
        call.add_done_callback(partial(self._on_call_done, flight))

    def _on_call_done(self, flight: Flight, call: asyncio.Future[None]) -> None:
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None and not flight.has_landed:
            flight.fail(
                UnavailableError(f"the decode worker refused the request: {error}", retry_after_s=1.0)
            )
            self._land(flight)

    def _attempt(self, flight: Flight, function: Callable[..., None], *args: Any) -> None:
        """What raises ends this request and nothing else."""
        try:
            function(*args)
        except Exception as error:
            self._crash(flight, error)

    def _crash(self, flight: Flight, error: Exception) -> None:
        flight.fail(self._named(error))
        if not flight.has_landed:
            self._land(flight)

    def _named(self, error: Exception) -> ClusterError:
        """What the client is told; an error that is this door's own is in the log, and counted."""
        if not isinstance(error, ClusterError):
            self.num_crashed += 1
            logger.error("a request ended because of an error in this door", exc_info=error)
        return to_known(error)

    def _land(self, flight: Flight) -> None:
        """Every stage that may still hold something lets go. A request that is over at decode is over at prefill, too; one
        that prefill has ended waits there for this Cancel, and an encoder may be left with an item that prefill found in
        its prefix cache."""
        request_id = flight.request.request_id
        del self._flights[request_id]
        flight.has_landed = True
        if self.quarantine and not flight.has_failed and flight.open_choices:
            self.quarantine.survived(flight.content)
        _tried(self._encode.on_landed, flight)
        _tried(self._placing.landed, flight)
        _tried(self._entrance.leave, request_id)
        ended = [flight.prefill, flight.decode] if flight.is_over_at_decode else []
        assert self.members is not None
        for peer in flight.peers:
            peer.num_flights -= 1
            if peer not in ended:
                _tried(peer.send, Cancel(request_id))
            _tried(self.members.close_if_drained, peer)


def _tried(function: Callable[..., None], *args: Any) -> None:
    """What raises concerns no request, or one that is over: it is logged."""
    try:
        function(*args)
    except Exception:
        logger.exception("an error in this door")
