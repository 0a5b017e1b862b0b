"""What an encoder worker knows of one media item, and of each request for it.

All requests for one media hash share the item, so an item is encoded once at a time. Its life is in
`cluster.types.media_phase`: `EncodeItem` is the record until CACHED, the cache's entry is the record from
ENCODING on.

A delivery (one request for one item) waits for rows and for its target, then sends:

    WAITING → SENDING → ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from cluster.scheduling.keys import Ticket
from cluster.types.media import MediaItem
from cluster.types.media_phase import MediaPhase, next_phase
from cluster.types.timings import EncodeTiming
from cluster.types.transfer import ReceivedGrant
from cluster.worker.outbox import DoorId
from encoder_service.runner import Prepared
from kv_transfer.lease.outgoing import Outgoing


@dataclass(eq=False)
class ItemTimestamps:
    """Instants of an item's way, by the engine's clock. 0: not yet, or before the present deliveries
    existed."""

    prepared_at: float = 0.0
    called_at: float = 0.0  # the first call began
    encoded_at: float = 0.0  # the last call ended


@dataclass(eq=False)
class Delivery:
    """One request for one item. Written by the engine's thread only."""

    door: DoorId
    request_id: str
    item_idx: int
    item: MediaItem  # kept until the end: if rows are evicted before they are sent, the item is encoded again
    ticket: Ticket  # its place in the order; `request_id` of this ticket is the media hash
    keep: bool  # another use is expected
    from_cache: bool = False
    target: ReceivedGrant | None = None
    outgoing: Outgoing | None = None
    came_at: float = 0.0  # when StartEncode arrived
    sent_at: float = 0.0  # when the transfer began
    # Of the item, when it was last in work.
    timestamps: ItemTimestamps = field(default_factory=ItemTimestamps)

    @property
    def media_hash(self) -> str:
        return self.item.media_hash

    @property
    def key(self) -> str:
        return delivery_key(self.request_id, self.item_idx)

    def timing(self, ended_at: float) -> EncodeTiming:
        """Time that the item spent before this delivery existed does not count."""
        timestamps = self.timestamps
        instants = (
            self.came_at,
            timestamps.prepared_at,
            timestamps.called_at,
            timestamps.encoded_at,
            self.sent_at,
            ended_at,
        )
        return EncodeTiming(*(end - start for start, end in pairwise(accumulate(instants, max))))


def delivery_key(request_id: str, item_idx: int) -> str:
    return f"{request_id}/{item_idx}"


@dataclass(eq=False)
class EncodeItem:
    """Written by the engine's thread only."""

    item: MediaItem
    ticket: Ticket  # the most urgent ticket of its deliveries
    phase: MediaPhase = MediaPhase.PREPARING
    prepared: Prepared | None = None  # from READY on
    num_units_done: int = 0  # of `prepared.num_units`: encoded by earlier calls
    num_rows_done: int = 0
    is_suspect: bool = False  # a call with this item and others has failed: the item runs alone
    keep: bool = False  # a delivery expects another use
    timestamps: ItemTimestamps = field(default_factory=ItemTimestamps)
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
        """Rows that the encoder computes for the item: more than `num_rows` if rows are pooled. An upper
        estimate."""
        return self.item.num_call_rows

    def move(self, phase: MediaPhase) -> None:
        self.phase = next_phase(self.media_hash, self.phase, phase)


class Holdings:
    """How much each of several holders holds, of bytes or rows, and the sum. The sum is zero when every
    holder has released."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def hold(self, name: str, amount: int) -> None:
        """`name` holds this amount from now on, whatever it held before."""
        self._total += amount - self._held.get(name, 0)
        self._held[name] = amount

    def release(self, name: str) -> None:
        """Names that hold nothing are ignored."""
        self._total -= self._held.pop(name, 0)
