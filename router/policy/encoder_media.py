"""Which encoder has a media item or has taken it on, and when the items in work will be ready."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.types.media import Modality
from router.policy.in_flight import InFlightItem
from router.policy.index import HolderIndex
from router.policy.pool import Floats, WorkerPool
from router.policy.views import ItemView

MAX_ARRIVING = 65_536


def row_s(encoders: WorkerPool) -> Floats:
    """[encoders]: seconds of an embedding row of unknown modality."""
    curves = [encoders.curve(f"encode {modality}").per_unit_s for modality in Modality]
    return np.mean(curves, axis=0)


class EncoderMedia:
    def __init__(self, encoders: WorkerPool):
        self.index: HolderIndex[str] = HolderIndex()
        self._encoders = encoders
        # (encoder's slot, media hash) → instant when the encoder has the item
        self._arriving: dict[tuple[int, str], float] = {}

    def changed(self, encoder: str, added: Sequence[str], evicted: Sequence[str], now: float) -> None:
        """The encoder has taken on `added` items, for any door, and no longer has the `evicted` ones."""
        slot = self._encoders.slots.get(encoder)
        if slot is None:
            return
        self.index.discard(slot, evicted)
        for media_hash in evicted:
            self._arriving.pop((slot, media_hash), None)
        ready_at = now + self._queue_s(slot)
        if ready_at > now:  # the last item taken on is ready when the queue is empty
            for media_hash in added:
                self._arriving.setdefault((slot, media_hash), ready_at)
        self.index.add(slot, added)
        if len(self._arriving) > MAX_ARRIVING:
            self._arriving = {key: at for key, at in self._arriving.items() if at > now}

    def drop(self, slot: int) -> None:
        """The encoder is gone."""
        self.index.drop(slot)
        self._arriving = {key: at for key, at in self._arriving.items() if key[0] != slot}

    def arriving_s(self, slot: int, media_hash: str, now: float) -> float:
        """How long an encoder that has taken an item on still needs for it."""
        return max(0.0, self._arriving.get((slot, media_hash), 0.0) - now)

    def assign(self, item: ItemView, encoder: str, encoded_s: float, now: float) -> InFlightItem:
        """This door asks the encoder for the item; `encoded_s`: until it is encoded. The item is charged
        unless the encoder has it already."""
        slot = self._encoders.slots[encoder]
        if encoded_s <= 0 or self.index.holders(item.media_hash) >> slot & 1:
            return InFlightItem(item, encoder, None)
        charge = self._encoders.charge(encoder, item.num_rows)
        self._encoders.told(charge, now)
        self.index.expect(slot, (item.media_hash,))
        self._arriving[slot, item.media_hash] = now + encoded_s
        return InFlightItem(item, encoder, charge)

    def release(self, item: InFlightItem) -> None:
        """The encoder has no more to do for this door's item. May be repeated."""
        charge, item.charge = item.charge, None
        if charge is None or not self._encoders.has(charge):
            return
        self._encoders.discharge(charge)
        self.index.unexpect(charge.slot, (item.view.media_hash,))

    def _queue_s(self, slot: int) -> float:
        num_rows = self._encoders.reported_units[slot] + self._encoders.sent_units[slot]
        return float(num_rows * row_s(self._encoders)[slot]) if num_rows > 0 else 0.0
