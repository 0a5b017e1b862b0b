"""One media item's life in an encoder worker, and the life of each request for it.

An item, known by its media hash; all requests for one hash share it, so nothing is encoded twice at a time:

    PREPARING  file bytes are decoded and preprocessed (CPU threads)   → READY, or ended (bad media)
    READY      waits for its turn on the device and for cache room     → ENCODED
    ENCODED    rows are in the cache, pinned while anybody is served   → leaves this table when nobody is; stays cached

A delivery (one request's wish for one item) waits for rows and for its target, then sends:

    WAITING → SENDING → ended
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from cluster.types.media import MediaItem
from cluster.types.transfer import Grant
from cluster.worker.outbox import DoorId
from kv_transfer.outgoing import Outgoing


class ItemPhase(Enum):
    PREPARING = "preparing"
    READY = "ready"
    ENCODED = "encoded"


ITEM_TRANSITIONS: dict[ItemPhase, frozenset[ItemPhase]] = {
    ItemPhase.PREPARING: frozenset({ItemPhase.READY}),
    ItemPhase.READY: frozenset({ItemPhase.ENCODED}),
    ItemPhase.ENCODED: frozenset(),
}


@dataclass(eq=False)
class Delivery:
    """One request's wish for one item. Written by the engine only."""

    door: DoorId
    request_id: str
    item_idx: int
    item: MediaItem  # kept until the end: rows evicted before they could be sent are encoded again
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
    """Written by the engine only."""

    item: MediaItem
    phase: ItemPhase = ItemPhase.PREPARING
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the processor's output while READY
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.item.geometry.num_tokens

    def move(self, phase: ItemPhase) -> None:
        if phase not in ITEM_TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.item.media_hash}: {self.phase} cannot become {phase}")
        self.phase = phase
