"""The memory that encoders write embeddings into: which requests share an item, and which items wait for
room.

All requests in work that show an item share one copy of its embeddings. The first of them is told where its
embeddings go (`FeatureGranted`) and owns the lease. The others are told that nothing is needed from them
(`FeatureShared`). The life of a copy is in `cluster.types.media_phase`:
* If its lease ends without embeddings, a new lease is granted, because the owner's door asks another encoder.
* Its room is freed when its last consumer has released it and no lease is open.

An owner may release the copy early:
* If the owner only does not need the item any more, its lease serves the other consumers.
* If the owner has failed or was cancelled, its encoder is about to stop. The other consumers move to other
  room as soon as there is some; until then they wait for that, or for the end of the lease, and then take
  this room over. The owner itself does the same when its encoder is lost (`renew`).

If the door expects that the prefix cache has an item's tokens, the item has its place in the order and its
room like any other, but no encoder is asked: only when the prompt's prefix has been looked up and the tokens
are not there (`want`), or when another request needs the item, the room is granted.

If an encoder of this process is to bring an item, its room is not leased. The encoder is told that there is
room (`on_room`) and copies the rows into it (`deposit`), or gives up (`give_up`, and `renew` without a
lease); then the room is granted like any other.

`harmed_by` names the requests whose room an encoder may have written to after the room had been given to
others (`kv_transfer.lease.receiver`).

Room is given strictly in order of arrival: requests in order, and the items of a request in prompt order.
Prefill gives KV blocks in the same order. So the oldest request always gets what it needs, and no request
waits for a younger one. For the same reason a new request does not join a copy behind which other items wait
already: they would wait for the new request. It gets a copy of its own, at the end of the queue.

Called from several threads: the event loop reserves, so that an encoder never waits for a model step; the
engine reads and releases; an encoder of this process deposits. Therefore everything happens under one lock,
and nothing inside waits longer than for the copy of an item's rows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.media_phase import MediaPhase, next_phase
from cluster.types.messages import FeatureGranted, FeatureShared
from kv_transfer.lease.transfer_engine import TransferEngine

ItemKey = tuple[str, int]  # request id, item index
Tell = Callable[[FeatureGranted | FeatureShared], None]


@dataclass(frozen=True)
class _Consumer:
    key: ItemKey
    ttl_s: float
    tell: Tell  # tells the door that asked
    on_room: Callable[[], None] | None = (
        None  # an encoder of this process brings the item: it is told of room
    )
    is_wanted: bool = True  # False: the item's tokens are expected in the prefix cache


@dataclass(eq=False)
class _FeatureCopy:
    """One copy of an item's embeddings, for all its consumers."""

    name: tuple[str, int]  # media hash, number of rows
    consumers: dict[ItemKey, _Consumer] = field(default_factory=dict)  # in order of arrival
    block_ids: list[int] = field(default_factory=list)
    lease_id: str = ""  # while a lease is open
    # The consumer for which the lease was granted; it may have left. None: no encoder was asked yet
    owner: ItemKey | None = None
    phase: MediaPhase = MediaPhase.QUEUED

    def move(self, phase: MediaPhase) -> None:
        self.phase = next_phase(self.name[0], self.phase, phase)


class FeatureStore:
    def __init__(self, memory: BlockMemory, blocks: BlockPool, transfer_engine: TransferEngine):
        self._memory = memory
        self._blocks = blocks
        self._transfer_engine = transfer_engine
        self._lock = threading.Lock()
        self._queued: deque[_FeatureCopy] = deque()
        # Copies whose writer was given up while there was no other room, by lease.
        self._given_up: dict[str, _FeatureCopy] = {}
        self._items: dict[ItemKey, _FeatureCopy] = {}
        # Copies that have consumers, oldest first.
        self._by_name: dict[tuple[str, int], list[_FeatureCopy]] = {}
        self._by_lease: dict[str, _FeatureCopy] = {}
        # Copies with room that an encoder of this process fills, by the owner's item.
        self._filled_here: dict[ItemKey, _FeatureCopy] = {}
        # By request in work: blocks whose rows its KV was computed from.
        self._merged: dict[str, set[int]] = {}

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
        return len(self._by_lease)

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
            name = (media_hash, num_rows)
            copies = self._by_name.setdefault(name, [])
            is_shared = bool(copies) and (not self._queued or self._queued[-1] is copies[-1])
            if not is_shared:
                copies.append(_FeatureCopy(name))
                self._queued.append(copies[-1])
            copy = copies[-1]
            is_brought = copy.owner is not None or any(each.is_wanted for each in copy.consumers.values())
            copy.consumers[key] = _Consumer(key, ttl_s, tell, None if is_brought else on_room, is_wanted)
            self._items[key] = copy
            if is_brought and is_wanted:
                tell(FeatureShared(*key))
            self._ask_if_wanted(copy)
            self._grant_queued()

    def want(self, key: ItemKey) -> None:
        """The prefix cache does not have all tokens of the item. Items that are wanted already, or were
        released, are ignored. Engine thread."""
        with self._lock:
            copy = self._items.get(key)
            if copy is not None and not copy.consumers[key].is_wanted:
                copy.consumers[key] = replace(copy.consumers[key], is_wanted=True)
                self._ask_if_wanted(copy)

    def close_lease(self, lease_id: str, *, completed: bool) -> list[ItemKey]:
        """The encoder has finished or is gone. Returns all consumers whose embeddings have come. If they have
        not come, the room is granted to the first of the consumers that wait. Engine thread."""
        with self._lock:
            copy = self._by_lease.pop(lease_id, None)
            if copy is None:
                return []
            self._given_up.pop(lease_id, None)
            copy.lease_id = ""
            if completed and copy.consumers:
                copy.move(MediaPhase.STAGED)
                return list(copy.consumers)
            self._blocks.free(copy.block_ids)
            if not copy.consumers:
                copy.move(MediaPhase.DISCARDED)
            else:
                self._grant(copy, self._blocks.allocate(len(copy.block_ids)))
            self._grant_queued()
            return []

    def renew(self, key: ItemKey, lease_id: str) -> None:
        """The encoder that was given this grant of the item is lost: it has ended, or has no connection to
        its door, which it notices as well, and then stops. No lease: the item was to be encoded in this
        process, and now is elsewhere. Any thread."""
        with self._lock:
            copy = self._items.get(key)
            if copy is None:
                return
            if not lease_id:
                copy.consumers[key] = replace(copy.consumers[key], on_room=None)
                self._grant_elsewhere(key)
            elif copy.lease_id == lease_id and copy.owner == key:
                self._move_on(copy)

    def fill_here(self, lease_id: str) -> None:
        """The grant was passed to an encoder of this process: the rows need no transfer. Unknown leases are
        ignored. Any thread."""
        with self._lock:
            copy = self._by_lease.get(lease_id)
            if copy is None:
                return
            if copy.consumers and copy.owner is not None:  # else the end of the lease frees the room
                del self._by_lease[lease_id]
                self._given_up.pop(lease_id, None)
                copy.lease_id = ""
                self._filled_here[copy.owner] = copy
            self._transfer_engine.revoke(lease_id, "the embeddings are made in this process")

    def deposit(self, key: ItemKey, blocks: Callable[[], torch.Tensor]) -> list[ItemKey] | None:
        """An encoder of this process has the item's rows. `blocks()`: [num_blocks, block_size,
        feature_width]. Returns all consumers whose embeddings have come. None: there is no room yet, or the
        item is not wanted from this process. Any thread."""
        with self._lock:
            copy = self._filled_here.get(key)
            if copy is None:
                return None
            memory = self._memory.segments[0]
            memory.index_copy_(0, torch.tensor(copy.block_ids, device=memory.device), blocks())
            self._memory.synchronize()
            del self._filled_here[key]
            copy.move(MediaPhase.STAGED)
            return list(copy.consumers)

    def give_up(self, key: ItemKey) -> None:
        """An encoder of this process will not bring the item for this request. If the request still wants it,
        its door says what comes next: `renew` or `release`. Any thread."""
        with self._lock:
            if key not in self._items:
                self._grant_elsewhere(key)

    def harmed_by(self, block_ids: Iterable[int]) -> set[str]:
        """Requests that have, or have had, their embeddings in these blocks. Any thread."""
        with self._lock:
            blocks = set(block_ids)
            copies = {
                id(copy): copy for copy in self._items.values() if not blocks.isdisjoint(copy.block_ids)
            }
            waiting = {request_id for copy in copies.values() for request_id, _ in copy.consumers}
            return waiting | {name for name, merged in self._merged.items() if not blocks.isdisjoint(merged)}

    def ready_items(self, request_id: str, num_items: int) -> set[int]:
        """Items whose rows came before the request, or before the engine knew the request. Engine thread."""
        copies = [self._items.get((request_id, item_idx)) for item_idx in range(num_items)]
        return {
            item_idx
            for item_idx, copy in enumerate(copies)
            if copy is not None and copy.phase is MediaPhase.STAGED
        }

    def rows(self, key: ItemKey, start: int, end: int) -> list[torch.Tensor]:
        """Rows [start, end) of a ready item, in order, as views [n, feature_width] of the memory where they
        lie. Valid until the item is released. One view for each run of successive blocks, mostly a single
        one."""
        block_ids, size = self._items[key].block_ids, self._blocks.block_size
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
        """The request does not need the item any more. `has_ended`: the request itself is over, and its
        encoder will be told to stop. May be called for an item that was released before."""
        with self._lock:
            if has_ended:
                self._merged.pop(key[0], None)
            copy = self._items.pop(key, None)
            if copy is None:
                return
            if not has_ended and copy.phase is MediaPhase.STAGED:
                self._merged.setdefault(key[0], set()).update(copy.block_ids)
            self._drop(copy, key)
            if copy.consumers:
                if has_ended and copy.lease_id and copy.owner == key:
                    self._move_on(copy)
                elif has_ended:
                    self._grant_elsewhere(key)
                return
            if copy.lease_id:
                self._given_up.pop(copy.lease_id, None)
                self._transfer_engine.cancel(copy.lease_id)  # the room is freed when the lease has ended
            else:
                if copy.owner is not None:
                    self._filled_here.pop(copy.owner, None)
                if copy.phase is MediaPhase.QUEUED:
                    self._queued.remove(copy)
                self._blocks.free(copy.block_ids)
                copy.move(MediaPhase.DISCARDED)
            self._grant_queued()

    def _drop(self, copy: _FeatureCopy, key: ItemKey) -> None:
        del copy.consumers[key]
        if not copy.consumers:
            copies = self._by_name[copy.name]
            copies.remove(copy)
            if not copies:
                del self._by_name[copy.name]

    def _move_on(self, copy: _FeatureCopy) -> None:
        """Moves the copy out of room whose writer was given up, as soon as there is free room. All items that
        wait for room are younger."""
        block_ids = self._blocks.try_allocate(len(copy.block_ids))
        if block_ids is None:
            self._given_up[copy.lease_id] = copy
            return
        self._given_up.pop(copy.lease_id, None)
        self._by_lease[copy.lease_id] = _FeatureCopy(
            copy.name, {}, copy.block_ids, copy.lease_id, phase=MediaPhase.STAGING
        )
        self._transfer_engine.cancel(copy.lease_id)
        self._grant(copy, block_ids)

    def _can_move_later(self) -> bool:
        """Whether a copy whose writer was given up gets other room when younger items are released. False if
        all of them are too large for what is not held by such writers: then they wait for a lease to end."""
        if not self._given_up:
            return False
        fenced = (
            copy for name, copy in self._by_lease.items() if not copy.consumers or name in self._given_up
        )
        num_usable = self._blocks.num_blocks - sum(len(copy.block_ids) for copy in fenced)
        return any(len(copy.block_ids) <= num_usable for copy in self._given_up.values())

    def _grant_elsewhere(self, key: ItemKey) -> None:
        """If the room that belongs to this item was to be filled in this process, another encoder gets it."""
        copy = self._filled_here.pop(key, None)
        if copy is not None:
            self._grant(copy, copy.block_ids)

    def _grant_queued(self) -> None:
        """Gives free room to the items that wait for it: first to those whose writer was given up, because
        they are older than all that have no room."""
        for copy in list(self._given_up.values()):
            self._move_on(copy)
        if self._can_move_later():
            return
        while self._queued:
            _, num_rows = self._queued[0].name
            block_ids = self._blocks.try_allocate(-(-num_rows // self._blocks.block_size))
            if block_ids is None:
                return
            self._grant(self._queued.popleft(), block_ids)

    def _grant(self, copy: _FeatureCopy, block_ids: Sequence[int]) -> None:
        copy.move(MediaPhase.STAGING)
        copy.owner, copy.block_ids = None, list(block_ids)
        copy.lease_id = ""  # an earlier one had other room
        self._ask_if_wanted(copy)

    def _ask_if_wanted(self, copy: _FeatureCopy) -> None:
        """If the copy has room that was not granted yet, the encoder of the first consumer that wants the
        item may write."""
        owner = next((each for each in copy.consumers.values() if each.is_wanted), None)
        if owner is None or copy.owner is not None or copy.phase is not MediaPhase.STAGING:
            return
        copy.owner = owner.key
        if owner.on_room is not None:
            self._filled_here[owner.key] = copy
            return owner.on_room()
        copy.lease_id = new_lease_id()
        self._by_lease[copy.lease_id] = copy
        generations = self._blocks.generations(copy.block_ids)
        grant = self._transfer_engine.grant(copy.lease_id, copy.block_ids, generations, owner.ttl_s)
        owner.tell(FeatureGranted(*owner.key, grant))
