"""The media side of a flight: who encodes which item, and what happens when that falls through.

    start     every item goes to the encoder it was placed at
    granted   prefill has room for an item's embeddings: its encoder is told where
    shared    prefill has them, or gets them, for another request: the item is called off
    failed    an encoder has given an item up, or its embeddings did not arrive: another encoder, if there is one, is asked
    lost      an encoder is gone: so are all items it had; prefill is told, so that it grants anew
    silent    an encoder has not moved for long: the same, where there is one that does move

An item that was in work at an encoder that was lost may be what ended it: it is a suspect (`router.flow.quarantine`), and an encoder has one
suspect at a time; the others are held here. So a second loss tells which one it was.

An item is known by its media hash everywhere, so one that is encoded twice does no harm. Bad media fails at once: no encoder
can help it. Lives on the door's event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.errors import (
    ClusterError,
    InternalError,
    MediaError,
    OverloadedError,
    UnavailableError,
    from_info,
)
from cluster.media.settings import item_name
from cluster.types.messages import (
    Cancel,
    EncoderLost,
    EncodeTarget,
    Failed,
    FeatureGranted,
    GrantPassed,
    ReturnGrant,
    StartEncode,
)
from cluster.types.transfer import Grant
from router.flow.flight import Flight
from router.flow.quarantine import Quarantine, barred_item
from router.members import Peer
from router.policy import ClusterView

MAX_ATTEMPTS = 3  # of one item, over all encoders

ChooseEncoder = Callable[
    [Flight, int, Peer], Peer
]  # an item's next encoder, after this one; raises UnavailableError
Attempt = Callable[..., None]  # (flight, function, *args)


class EncodeStage:
    """Of all flights of a door."""

    def __init__(
        self,
        cluster: ClusterView,
        choose: ChooseEncoder,
        timeout_s: float,
        quarantine: Quarantine,
        attempt: Attempt,
    ):
        """`timeout_s`: for an item, from its start until its embeddings are with prefill. `attempt`: does what may end a flight."""
        self._cluster = cluster
        self._choose = choose
        self._timeout_s = timeout_s
        self._quarantine = quarantine
        self._attempt = attempt
        self._suspects: dict[Peer, tuple[Flight, int]] = {}  # what each encoder has
        self._held: list[tuple[Flight, int]] = []

    def start(self, flight: Flight) -> None:
        """Of equal items the first is sent: prefill shares its embeddings, or grants the others after all."""
        sent: set[str] = set()
        for item_idx, item in enumerate(flight.items):
            if item.media_hash in sent:
                flight.errands[item_idx].is_shared = True
            else:
                sent.add(item.media_hash)
                self._start(flight, item_idx)

    def on_granted(self, flight: Flight, granted: FeatureGranted) -> None:
        errand = flight.errands[granted.item_idx]
        if errand.is_shared:  # whoever was to bring it has failed or left
            errand.is_shared = False
            self._start_anew(flight, granted.item_idx)
        elif errand.lease_id and not errand.is_held:  # what this encoder sent did not arrive
            errand.num_attempts += 1
            if errand.num_attempts > MAX_ATTEMPTS:
                flight.fail(
                    UnavailableError(f"the embeddings of media item {granted.item_idx} did not arrive")
                )
                return
            self._start_anew(flight, granted.item_idx)
        if errand.is_held:
            errand.grant = granted.grant
        else:
            self._pass_on(flight, granted.item_idx, granted.grant)

    def on_encoded(self, flight: Flight, item_idx: int) -> None:
        """Its encoder lives."""
        self._quarantine.survived(flight.items[item_idx].media_hash)
        self._release(flight, item_idx)

    def on_shared(self, flight: Flight, item_idx: int) -> None:
        errand = flight.errands[item_idx]
        errand.is_shared = True
        self._cluster.item_done(flight.request.request_id, item_idx)
        if not errand.is_held:
            errand.encoder.send(Cancel(flight.request.request_id, item_idx=item_idx))
        self._release(flight, item_idx)

    def on_failed(self, flight: Flight, peer: Peer, message: Failed) -> None:
        item_idx = message.item_idx
        error = from_info(message.error)
        if item_idx is None or flight.has_first_token:
            return
        errand = flight.errands[item_idx]
        if errand.encoder is not peer or errand.is_shared:
            return  # an earlier encoder's last word, or one about an item that is not needed from it
        self._release(flight, item_idx)
        if isinstance(error, MediaError):
            self._quarantine.survived(flight.items[item_idx].media_hash)
            name = item_name(flight.request.prompt.media[item_idx].modality, item_idx)
            flight.fail(MediaError(f"{name}: {error.message}", param="messages"))
        elif isinstance(error, UnavailableError | OverloadedError | InternalError):
            peer.send(Cancel(flight.request.request_id, item_idx=item_idx))  # if it was asked again meanwhile
            self._go_elsewhere(flight, item_idx, error)
        else:
            flight.fail(error)

    def on_lost(self, flight: Flight, peer: Peer) -> None:
        self._suspects.pop(peer, None)
        if flight.has_first_token:
            return
        for item_idx, errand in enumerate(flight.errands):
            if errand.encoder is not peer or flight.has_failed:
                continue
            media_hash = flight.items[item_idx].media_hash
            if item_idx in flight.encoding and not errand.is_shared and not errand.is_held:
                self._quarantine.lost(media_hash, peer.member.replica_id)
                if self._quarantine.is_barred(media_hash):
                    flight.fail(barred_item(flight.items[item_idx], item_idx))
                    return
            self._give_up(flight, item_idx)
            error = UnavailableError("the encode worker was lost", retry_after_s=1.0)
            self._go_elsewhere(flight, item_idx, error)

    def on_silent(self, flight: Flight, peer: Peer) -> None:
        """It may come to life again, so what it has is called off. Without another encoder that moves the items stay, and so do those
        that have been elsewhere before: an item can be so large that every encoder is silent over it."""
        if flight.has_first_token:
            return
        for item_idx, errand in enumerate(flight.errands):
            is_first = errand.num_attempts == 1 and not errand.is_shared and not errand.is_held
            is_wanted = is_first and item_idx in flight.encoding
            if errand.encoder is not peer or not is_wanted or self._other(flight, item_idx) is None:
                continue
            self._give_up(flight, item_idx)
            peer.send(Cancel(flight.request.request_id, item_idx=item_idx))
            self._go_elsewhere(flight, item_idx, UnavailableError("the encode worker does not move"))

    def on_landed(self, flight: Flight) -> None:
        """However it ended."""
        for item_idx, errand in enumerate(flight.errands):
            if errand.grant is not None and flight.prefill is not None:
                flight.prefill.send(ReturnGrant(errand.grant.lease_id))  # no encoder was given it
                errand.grant = None
            self._release(flight, item_idx)

    def _other(self, flight: Flight, item_idx: int) -> Peer | None:
        """An encoder that moves, beside the one that has the item."""
        try:
            other = self._choose(flight, item_idx, flight.errands[item_idx].encoder)
        except UnavailableError:
            return None
        return None if other.is_silent else other

    def _give_up(self, flight: Flight, item_idx: int) -> None:
        """The encoder of an item does not bring it any more: prefill grants other room."""
        lease_id = flight.errands[item_idx].lease_id
        if lease_id and flight.prefill is not None:
            flight.prefill.send(EncoderLost(flight.request.request_id, item_idx, lease_id))
        self._release(flight, item_idx)

    def _pass_on(self, flight: Flight, item_idx: int, grant: Grant) -> None:
        errand = flight.errands[item_idx]
        errand.lease_id = grant.lease_id
        errand.encoder.send(EncodeTarget(flight.request.request_id, item_idx, grant))
        if flight.prefill is not None:
            flight.prefill.send(GrantPassed(grant.lease_id, errand.encoder.member.processes))

    def _may_go(self, flight: Flight, item_idx: int) -> bool:
        """False: it is a suspect, and its encoder has another one. A suspect that may go is the encoder's from now on."""
        media_hash = flight.items[item_idx].media_hash
        if not self._quarantine.is_suspect(media_hash):
            return True
        encoder = flight.errands[item_idx].encoder
        there, idx = self._suspects.setdefault(encoder, (flight, item_idx))
        return there.items[idx].media_hash == media_hash

    def _release(self, flight: Flight, item_idx: int) -> None:
        """Its encoder does not have it any more. If it was a suspect, the next one may go there."""
        encoder = flight.errands[item_idx].encoder
        if self._suspects.get(encoder) != (flight, item_idx):
            return
        del self._suspects[encoder]
        held, self._held = self._held, []
        for next_flight, next_idx in held:
            errand = next_flight.errands[next_idx]
            if next_flight.has_landed or next_flight.has_failed or errand.is_shared:
                errand.is_held = False
            elif errand.encoder is encoder and self._may_go(next_flight, next_idx):
                errand.is_held = False
                self._attempt(next_flight, self._send, next_flight, next_idx)
            else:
                self._held.append((next_flight, next_idx))

    def _start(self, flight: Flight, item_idx: int) -> None:
        """At once, or as soon as it may go to its encoder."""
        errand = flight.errands[item_idx]
        may_go = self._may_go(flight, item_idx)
        if errand.is_held == may_go:
            errand.is_held = not may_go
            self._held.remove((flight, item_idx)) if may_go else self._held.append((flight, item_idx))
        if may_go:
            self._send(flight, item_idx)

    def _send(self, flight: Flight, item_idx: int) -> None:
        errand, item, request = flight.errands[item_idx], flight.items[item_idx], flight.request
        num_rows_before = sum(earlier.num_call_rows for earlier in flight.items[:item_idx])
        order = (request.priority, request.waited_s, num_rows_before)
        keep = item.media_hash in flight.returning
        errand.encoder.send(StartEncode(request.request_id, item_idx, item, self._timeout_s, *order, keep))
        grant, errand.grant = errand.grant, None
        if grant is not None:
            self._pass_on(flight, item_idx, grant)

    def _go_elsewhere(self, flight: Flight, item_idx: int, error: ClusterError) -> None:
        """To another encoder; fails the flight with `error` when there is none."""
        errand = flight.errands[item_idx]
        errand.num_attempts += 1
        errand.lease_id = ""
        if errand.num_attempts > MAX_ATTEMPTS:
            flight.fail(error)
            return
        try:
            encoder = self._choose(flight, item_idx, errand.encoder)
        except UnavailableError:
            flight.fail(error)
            return
        flight.move_item(item_idx, encoder)
        if not errand.is_shared:
            self._start_anew(flight, item_idx)

    def _start_anew(self, flight: Flight, item_idx: int) -> None:
        encoder = flight.errands[item_idx].encoder.member.replica_id
        self._cluster.item_moved(flight.request.request_id, item_idx, encoder)
        self._start(flight, item_idx)
