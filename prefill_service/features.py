"""The arena that encoders write embeddings into, and who waits for room in it.

Room is given strictly in order of arrival: requests in order, items in prompt order. Prefill takes KV blocks in the same
order, so the oldest request always gets what it needs and none can wait for a younger one.

Called from two threads (the event loop reserves, so that an encoder never waits for a model step; the engine reads and
releases), therefore under one lock; nothing inside waits.

An item's life: queued → reserved (leased to an encoder) → ready → released. An item released before its embeddings came
keeps its blocks until the lease closes, because the encoder may still write.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.messages import FeatureGranted
from kv_transfer.mover import Mover

ItemKey = tuple[str, int]  # request id, item index


@dataclass(eq=False)
class _Item:
    key: ItemKey
    num_rows: int
    ttl_s: float
    send: Callable[[FeatureGranted], None]  # to the door that asked
    block_ids: list[int] = field(default_factory=list)
    lease_id: str = ""
    is_ready: bool = False
    is_released: bool = False


class FeatureStore:
    def __init__(self, memory: BlockMemory, blocks: BlockPool, mover: Mover):
        self._memory = memory
        self._blocks = blocks
        self._mover = mover
        self._lock = threading.Lock()
        self._queued: deque[_Item] = deque()
        self._items: dict[ItemKey, _Item] = {}
        self._by_lease: dict[str, _Item] = {}

    @property
    def max_rows(self) -> int:
        """Rows of the largest item that can ever fit."""
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def num_used_blocks(self) -> int:
        return self._blocks.num_blocks - self._blocks.num_free

    @property
    def num_open_leases(self) -> int:
        return len(self._by_lease)

    def reserve(
        self, key: ItemKey, num_rows: int, ttl_s: float, send: Callable[[FeatureGranted], None]
    ) -> None:
        """Ask for room; `send` is called with the grant, at once or when room is there. Any thread."""
        with self._lock:
            item = _Item(key, num_rows, ttl_s, send)
            self._items[key] = item
            self._queued.append(item)
            self._grant_queued()

    def close_lease(self, lease_id: str, *, completed: bool) -> ItemKey | None:
        """The encoder is done or gone. Returns the item's key if somebody still waits for it. Engine thread."""
        with self._lock:
            item = self._by_lease.pop(lease_id, None)
            if item is None:
                return None
            if item.is_released:
                self._free(item)
                return None
            item.is_ready = completed
            return item.key

    def rows(self, key: ItemKey, start: int, end: int) -> torch.Tensor:
        """Rows [start, end) of a ready item: a copy [end - start, feature_width]."""
        item = self._items[key]
        rows_per_block = self._blocks.block_size
        first, last = start // rows_per_block, -(-end // rows_per_block)
        blocks = self._memory.segments[0][item.block_ids[first:last]]
        return blocks.flatten(0, 1)[start - first * rows_per_block : end - first * rows_per_block]

    def release(self, key: ItemKey) -> None:
        """Nobody wants the item any more. May be called for an item that was released before."""
        with self._lock:
            item = self._items.pop(key, None)
            if item is None:
                return
            item.is_released = True
            if not item.block_ids:
                self._queued.remove(item)
            elif item.lease_id in self._by_lease:
                self._mover.cancel(item.lease_id)
            else:
                self._free(item)
            self._grant_queued()

    def _free(self, item: _Item) -> None:
        self._blocks.free(item.block_ids)
        self._grant_queued()

    def _grant_queued(self) -> None:
        while self._queued:
            item = self._queued[0]
            block_ids = self._blocks.try_allocate(-(-item.num_rows // self._blocks.block_size))
            if block_ids is None:
                return
            self._queued.popleft()
            item.block_ids = block_ids
            item.lease_id = new_lease_id()
            self._by_lease[item.lease_id] = item
            generations = [self._blocks.generation(block_id) for block_id in block_ids]
            grant = self._mover.grant(item.lease_id, block_ids, generations, item.ttl_s)
            item.send(FeatureGranted(*item.key, grant))
