"""The media side of a flight: who encodes which item, and what happens when that falls through.

    start     every item goes to the encoder it was placed at
    granted   prefill has room for an item's embeddings: its encoder is told where
    shared    prefill has them, or gets them, for another request: the item is called off
    failed    an encoder has given an item up, or its embeddings did not arrive: another encoder, if there is one, is asked
    lost      an encoder is gone: so are all items it had; prefill is told, so that it grants anew

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
from cluster.types.messages import Cancel, EncoderLost, EncodeTarget, Failed, FeatureGranted, StartEncode
from router.flight import Flight
from router.members import Peer
from router.policy import ClusterView

MAX_ATTEMPTS = 3  # of one item, over all encoders

ChooseEncoder = Callable[
    [Flight, int, Peer], Peer
]  # an item's next encoder, after this one; raises UnavailableError


class EncodeStage:
    """Of all flights of a door."""

    def __init__(self, cluster: ClusterView, choose: ChooseEncoder, timeout_s: float):
        """`timeout_s`: for an item, from its start until its embeddings are with prefill."""
        self._cluster = cluster
        self._choose = choose
        self._timeout_s = timeout_s

    def start(self, flight: Flight) -> None:
        for item_idx in range(len(flight.items)):
            self._start(flight, item_idx)

    def on_granted(self, flight: Flight, granted: FeatureGranted) -> None:
        errand = flight.errands[granted.item_idx]
        if errand.is_shared:  # whoever was to bring it has failed or left
            errand.is_shared = False
            self._start_anew(flight, granted.item_idx)
        elif errand.has_target:  # what this encoder sent did not arrive
            errand.num_attempts += 1
            if errand.num_attempts > MAX_ATTEMPTS:
                flight.fail(
                    UnavailableError(f"the embeddings of media item {granted.item_idx} did not arrive")
                )
                return
            self._start_anew(flight, granted.item_idx)
        errand.has_target = True
        errand.encoder.send(EncodeTarget(granted.request_id, granted.item_idx, granted.grant))

    def on_shared(self, flight: Flight, item_idx: int) -> None:
        errand = flight.errands[item_idx]
        errand.is_shared = True
        self._cluster.item_done(flight.request.request_id, item_idx)
        errand.encoder.send(Cancel(flight.request.request_id, item_idx=item_idx))

    def on_failed(self, flight: Flight, peer: Peer, message: Failed) -> None:
        item_idx = message.item_idx
        error = from_info(message.error)
        if item_idx is None or flight.has_first_token:
            return
        errand = flight.errands[item_idx]
        if errand.encoder is not peer or errand.is_shared:
            return  # an earlier encoder's last word, or one about an item that is not needed from it
        if isinstance(error, MediaError):
            name = item_name(flight.request.prompt.media[item_idx].modality, item_idx)
            flight.fail(MediaError(f"{name}: {error.message}", param="messages"))
        elif isinstance(error, UnavailableError | OverloadedError | InternalError):
            peer.send(Cancel(flight.request.request_id, item_idx=item_idx))  # if it was asked again meanwhile
            self._go_elsewhere(flight, item_idx, error)
        else:
            flight.fail(error)

    def on_lost(self, flight: Flight, peer: Peer) -> None:
        if flight.has_first_token:
            return
        for item_idx, errand in enumerate(flight.errands):
            if errand.encoder is not peer or flight.has_failed:
                continue
            if errand.has_target and flight.prefill is not None:
                flight.prefill.send(EncoderLost(flight.request.request_id, item_idx))
            error = UnavailableError("the encode worker was lost", retry_after_s=1.0)
            self._go_elsewhere(flight, item_idx, error)

    def _start(self, flight: Flight, item_idx: int) -> None:
        encoder, item = flight.errands[item_idx].encoder, flight.items[item_idx]
        request = flight.request
        num_rows_before = sum(earlier.geometry.num_tokens for earlier in flight.items[:item_idx])
        order = (request.priority, request.waited_s, num_rows_before)
        keep = item.media_hash in flight.returning
        encoder.send(StartEncode(request.request_id, item_idx, item, self._timeout_s, *order, keep))

    def _go_elsewhere(self, flight: Flight, item_idx: int, error: ClusterError) -> None:
        """To another encoder; fails the flight with `error` when there is none."""
        errand = flight.errands[item_idx]
        errand.num_attempts += 1
        errand.has_target = False
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
