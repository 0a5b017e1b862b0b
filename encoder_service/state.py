"""One media item's life in an encoder worker, and the life of each request for it.

An item, known by its media hash; all requests for one hash share it, so nothing is encoded twice at a time:

    PREPARING  waits for a thread, then its file is decoded and preprocessed (CPU threads)  → READY, DISCARDED (bad media)
    READY      its tensors wait for the device and for room in the cache                    → ENCODING, DISCARDED
    ENCODING   has room in the cache; its rows are written there, call by call              → CACHED, DISCARDED
    CACHED     all rows are in registered memory, for whoever wants them, or for later      → SENDING, DISCARDED (evicted)
    SENDING    rows are being written to prefill workers and stay until that is over        → CACHED

`EncodeItem` is the record until CACHED, the cache's entry is from ENCODING on. Then prefill's half of the chain begins: the
rows are staged in its memory (reserved → ready), merged into the prompt, and released when the prompt is computed.

A delivery (one request's wish for one item) waits for rows and for its target, then sends:

    WAITING → SENDING → ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.scheduling.keys import Ticket
from cluster.types.media import MediaItem
from cluster.types.transfer import Grant
from cluster.worker.outbox import DoorId
from encoder_service.runner import Prepared
from kv_transfer.outgoing import Outgoing


class ItemPhase(Enum):
    PREPARING = "preparing"
    READY = "ready"
    ENCODING = "encoding"
    CACHED = "cached"
    SENDING = "sending"
    DISCARDED = "discarded"


TRANSITIONS: dict[ItemPhase, frozenset[ItemPhase]] = {
    ItemPhase.PREPARING: frozenset({ItemPhase.READY, ItemPhase.DISCARDED}),
    ItemPhase.READY: frozenset({ItemPhase.ENCODING, ItemPhase.DISCARDED}),
    ItemPhase.ENCODING: frozenset({ItemPhase.CACHED, ItemPhase.DISCARDED}),
    ItemPhase.CACHED: frozenset({ItemPhase.SENDING, ItemPhase.DISCARDED}),
    ItemPhase.SENDING: frozenset({ItemPhase.CACHED}),
    ItemPhase.DISCARDED: frozenset(),
}


def next_phase(media_hash: str, present: ItemPhase, wanted: ItemPhase) -> ItemPhase:
    """`wanted`, if the table allows it. Raises AssertionError."""
    if wanted not in TRANSITIONS[present]:
        raise AssertionError(f"{media_hash}: {present} cannot become {wanted}")
    return wanted


@dataclass(eq=False)
class Delivery:
    """One request's wish for one item. Written by the engine's thread only."""

    door: DoorId
    request_id: str
    item_idx: int
    item: MediaItem  # kept until the end: rows evicted before they could be sent are encoded again
    ticket: Ticket  # its place in the order; `request_id` there is the media hash
    keep: bool = True  # another use is expected
    from_cache: bool = False
    target: Grant | None = None
    outgoing: Outgoing | None = None

    @property
    def media_hash(self) -> str:
        return self.item.media_hash

    @property
    def key(self) -> str:
        return delivery_key(self.request_id, self.item_idx)


def delivery_key(request_id: str, item_idx: int) -> str:
    return f"{request_id}/{item_idx}"


@dataclass(eq=False)
class EncodeItem:
    """Written by the engine's thread only."""

    item: MediaItem
    ticket: Ticket  # the most urgent of its deliveries'
    phase: ItemPhase = ItemPhase.PREPARING
    prepared: Prepared | None = None  # from READY on
    num_units_done: int = 0  # of `prepared.num_units`: what earlier calls have encoded
    num_rows_done: int = 0
    is_suspect: bool = False  # a call with it and others has failed: it runs alone
    keep: bool = False  # some delivery expects another use
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def media_hash(self) -> str:
        return self.item.media_hash

    @property
    def num_rows(self) -> int:
        """Embedding rows, after pooling."""
        return self.item.geometry.num_tokens

    @property
    def num_call_rows(self) -> int:
        """Rows that the encoder computes for it: more than `num_rows` if they are pooled. An estimate from above."""
        return num_call_rows(self.item)

    def move(self, phase: ItemPhase) -> None:
        self.phase = next_phase(self.media_hash, self.phase, phase)


def num_call_rows(item: MediaItem) -> int:
    """Rows that the encoder computes for an item, before pooling. An estimate from above: groups at the edges are smaller."""
    options = item.options
    return item.geometry.num_tokens * options.temporal_pooling * options.spatial_pooling**2
