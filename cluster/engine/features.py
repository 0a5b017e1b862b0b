"""The memory that encoders write embeddings into, for prompts in work.

Requests that show an item share one copy of its embeddings (`SharedCopies`). Copies wait for room, and the
encoder of a copy for the right to write there (`RoomQueue`). The life of a copy: `cluster.types.media_phase`.

Several threads call: the event loop reserves, so that an encoder never waits for a model step; the engine
reads and releases; an encoder of this process deposits. Therefore both parts are used under one lock, and
nothing inside waits longer than for the copy of an item's rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from cluster.engine.room_queue import RoomQueue
from cluster.engine.shared_copies import Consumer, FeatureCopy, ItemKey, SharedCopies, Tell
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.messages import FeatureShared
from kv_transfer.lease.transfer_engine import TransferEngine


class FeatureStore:
    def __init__(self, memory: BlockMemory, blocks: BlockPool, transfer_engine: TransferEngine):
        self._memory = memory
        self._blocks = blocks
        self._lock = threading.Lock()
        self.copies = SharedCopies()
        self._rooms = RoomQueue(blocks, transfer_engine)

    @property
    def max_rows(self) -> int:
        """Rows of the largest item that can ever fit."""
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def num_used_blocks(self) -> int:
        return self._blocks.num_blocks - self._blocks.num_free

    @property
    def held_bytes(self) -> int:
        return self.num_used_blocks * self._memory.layout.block_bytes

    @property
    def num_open_leases(self) -> int:
        return self._rooms.num_open_leases

    def reserve(
        self,
        key: ItemKey,
        media_hash: str,
        num_rows: int,
        ttl_s: float,
        tell: Tell,
        on_room: Callable[[], None] | None = None,
        *,
        is_wanted: bool = True,
    ) -> None:
        """Asks for embeddings. Any thread. `tell` is called
        * with `FeatureShared`, at once, if the embeddings come without the caller's help;
        * with `FeatureGranted`, if the caller's encoder has to send them: when there is room, which may be at
          once, or later, if the embeddings were shared but did not come.
        `on_room`: the encoder is in this process; called when there is room, instead of a grant.
        `is_wanted`: false if the item may not be needed; then neither happens before `want`."""
        with self._lock:
            copy = self.copies.newest((media_hash, num_rows))
            if copy is None or not self._rooms.may_join(copy):
                copy = FeatureCopy((media_hash, num_rows))
                self._rooms.put(copy)
            is_brought = copy.is_brought
            consumer = Consumer(key, ttl_s, tell, None if is_brought else on_room, is_wanted)
            self.copies.join(copy, consumer)
            if is_brought and is_wanted:
                tell(FeatureShared(*key))
            self._rooms.ask_if_wanted(copy)
            self._rooms.serve()

    def want(self, key: ItemKey) -> None:
        """The prefix cache does not have all tokens of the item. Items that are wanted already, or were
        released, are ignored. Engine thread."""
        with self._lock:
            copy = self.copies.get(key)
            if copy is not None and not copy.consumers[key].is_wanted:
                copy.want(key)
                self._rooms.ask_if_wanted(copy)

    def close_lease(self, lease_id: str, *, completed: bool) -> list[ItemKey]:
        """The encoder has finished or is gone. Returns all consumers whose embeddings have come. Engine
        thread."""
        with self._lock:
            copy = self._rooms.close(lease_id, completed=completed)
            return [] if copy is None else list(copy.consumers)

    def renew(self, key: ItemKey, lease_id: str) -> None:
        """The encoder that was given this grant of the item is lost: it has ended, or has no connection to
        its door, which it notices as well, and then stops. No lease: the item was to be encoded in this
        process, and now is elsewhere. Any thread."""
        with self._lock:
            copy = self.copies.get(key)
            if copy is None:
                return
            if not lease_id:
                copy.encode_elsewhere(key)
                self._rooms.fill_elsewhere(key)
            elif copy.lease_id == lease_id and copy.owner == key:
                self._rooms.move_on(copy)

    def fill_here(self, lease_id: str) -> None:
        """The grant was passed to an encoder of this process: the rows need no transfer. Unknown leases are
        ignored. Any thread."""
        with self._lock:
            self._rooms.fill_here(lease_id)

    def deposit(self, key: ItemKey, blocks: Callable[[], torch.Tensor]) -> list[ItemKey] | None:
        """An encoder of this process has the item's rows. `blocks()`: [num_blocks, block_size,
        feature_width]. Returns all consumers whose embeddings have come. None: there is no room yet, or the
        item is not wanted from this process. Any thread."""
        with self._lock:
            copy = self._rooms.filled_here(key)
            if copy is None:
                return None
            memory = self._memory.segments[0]
            memory.index_copy_(0, torch.tensor(copy.block_ids, device=memory.device), blocks())
            self._memory.synchronize()
            self._rooms.complete(key)
            return list(copy.consumers)

    def give_up(self, key: ItemKey) -> None:
        """An encoder of this process will not bring the item for this request. If the request still wants it,
        its door says what comes next: `renew` or `release`. Any thread."""
        with self._lock:
            if key not in self.copies:
                self._rooms.fill_elsewhere(key)

    def harmed_by(self, block_ids: Iterable[int]) -> set[str]:
        """Requests whose embeddings are, or were, in these blocks, which an encoder may have written to after
        they had been given to others (`kv_transfer.lease.receiver`). Any thread."""
        with self._lock:
            return self.copies.harmed_by(block_ids)

    def ready_items(self, request_id: str, num_items: int) -> set[int]:
        """Items whose rows came before the request, or before the engine knew the request. Engine thread."""
        return self.copies.ready_items(request_id, num_items)

    def rows(self, key: ItemKey, start: int, end: int) -> list[torch.Tensor]:
        """Rows [start, end) of a ready item, in order, as views [n, feature_width] of the memory where they
        lie. Valid until the item is released. One view for each run of successive blocks, mostly a single
        one."""
        block_ids, size = self.copies[key].block_ids, self._blocks.block_size
        rows = self._memory.segments[0].flatten(0, 1)
        views = []
        while start < end:
            block = first = start // size
            while block * size + size < end and block_ids[block + 1] == block_ids[block] + 1:
                block += 1
            count = min(end, (block + 1) * size) - start
            offset = block_ids[first] * size + start % size
            views.append(rows[offset : offset + count])
            start += count
        return views

    def release(self, key: ItemKey, *, has_ended: bool = False) -> None:
        """The request does not need the item any more: then its lease serves the other consumers.
        `has_ended`: the request itself is over, and its encoder will be told to stop: then they get other
        room. May be called for an item that was released before."""
        with self._lock:
            copy = self.copies.leave(key, has_ended=has_ended)
            if copy is None:
                return
            if not copy.consumers:
                self._rooms.remove(copy)
            elif has_ended and copy.lease_id and copy.owner == key:
                self._rooms.move_on(copy)
            elif has_ended:
                self._rooms.fill_elsewhere(key)
