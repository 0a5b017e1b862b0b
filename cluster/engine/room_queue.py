"""Which copy of an item's embeddings gets room next, and which encoder may write into it.

Room is given strictly in order of arrival, as KV blocks are: so the oldest request always gets what it needs,
and none waits for a younger one. The encoder of the first consumer that wants the copy fills its room: under
a lease (`FeatureGranted`) or, if that encoder is in this process, when it is called.

A writer may be given up while its lease is open: it is lost, or its request has ended. Then the copy moves to
other room as soon as there is some, before all copies that have none. If the lease ends first, the copy gets
this room again.

Owns the blocks of all copies. Used under the lock of `FeatureStore`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cluster.engine.shared_copies import FeatureCopy, ItemKey
from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.types.media_phase import MediaPhase
from cluster.types.messages import FeatureGranted
from kv_transfer.lease.transfer_engine import TransferEngine


class RoomQueue:
    def __init__(self, blocks: BlockPool, transfer_engine: TransferEngine):
        self._blocks = blocks
        self._transfer_engine = transfer_engine
        self._queued: deque[FeatureCopy] = deque()
        self._by_lease: dict[str, FeatureCopy] = {}
        # Copies whose writer was given up while there was no other room, by lease.
        self._given_up: dict[str, FeatureCopy] = {}
        # Copies with room that an encoder of this process fills, by the owner's item.
        self._filled_here: dict[ItemKey, FeatureCopy] = {}

    @property
    def num_open_leases(self) -> int:
        return len(self._by_lease)

    def may_join(self, copy: FeatureCopy) -> bool:
        """False: other items wait behind the copy, and would then wait for the new consumer."""
        return not self._queued or self._queued[-1] is copy

    def put(self, copy: FeatureCopy) -> None:
        """A new copy waits for room, after all others."""
        self._queued.append(copy)

    def serve(self) -> None:
        """Gives free room to the copies that wait for it: first to those whose writer was given up, because
        they are older than all that have no room."""
        for copy in list(self._given_up.values()):
            self.move_on(copy)
        if self._can_move_later():
            return
        while self._queued:
            _, num_rows = self._queued[0].name
            block_ids = self._blocks.try_allocate(-(-num_rows // self._blocks.block_size))
            if block_ids is None:
                return
            self._give(self._queued.popleft(), block_ids)

    def ask_if_wanted(self, copy: FeatureCopy) -> None:
        """If the copy has room that no encoder was asked to fill, the encoder of the first consumer that
        wants the item may write."""
        consumer = copy.first_wanting
        if consumer is None or copy.owner is not None or copy.phase is not MediaPhase.STAGING:
            return
        if consumer.on_room is not None:
            copy.be_owned(consumer.key)
            self._filled_here[consumer.key] = copy
            return consumer.on_room()
        lease_id = new_lease_id()
        copy.be_owned(consumer.key, lease_id)
        self._by_lease[lease_id] = copy
        generations = self._blocks.generations(copy.block_ids)
        grant = self._transfer_engine.grant(lease_id, copy.block_ids, generations, consumer.ttl_s)
        consumer.tell(FeatureGranted(*consumer.key, grant))

    def close(self, lease_id: str, *, completed: bool) -> FeatureCopy | None:
        """A lease has ended. Returns its copy if the embeddings have come. If they have not, the room is
        granted to the first consumer that waits for them."""
        copy = self._pop_lease(lease_id)
        if copy is None:
            return None
        if completed and copy.consumers:
            copy.move(MediaPhase.STAGED)
            return copy
        self._blocks.free(copy.block_ids)
        if not copy.consumers:
            copy.move(MediaPhase.DISCARDED)
        else:
            self._give(copy, self._blocks.allocate(len(copy.block_ids)))
        self.serve()
        return None

    def move_on(self, copy: FeatureCopy) -> None:
        """The writer of the copy is given up: the copy moves to other room as soon as there is some. All
        items that wait for room are younger."""
        block_ids = self._blocks.try_allocate(len(copy.block_ids))
        if block_ids is None:
            self._given_up[copy.lease_id] = copy
            return
        self._given_up.pop(copy.lease_id, None)
        self._by_lease[copy.lease_id] = FeatureCopy(
            copy.name, {}, copy.block_ids, copy.lease_id, phase=MediaPhase.STAGING
        )
        self._transfer_engine.cancel(copy.lease_id)
        self._give(copy, block_ids)

    def remove(self, copy: FeatureCopy) -> None:
        """The copy has no consumers any more. Room under a lease is freed when the lease has ended."""
        if copy.lease_id:
            self._given_up.pop(copy.lease_id, None)
            self._transfer_engine.cancel(copy.lease_id)
        else:
            if copy.owner is not None:
                self._filled_here.pop(copy.owner, None)
            if copy.phase is MediaPhase.QUEUED:
                self._queued.remove(copy)
            self._blocks.free(copy.block_ids)
            copy.move(MediaPhase.DISCARDED)
        self.serve()

    # Room that an encoder of this process fills

    def fill_here(self, lease_id: str) -> None:
        """The grant was passed to an encoder of this process: the rows need no transfer. Unknown leases are
        ignored."""
        copy = self._by_lease.get(lease_id)
        if copy is None:
            return
        if copy.consumers and copy.owner is not None:  # else the end of the lease frees the room
            self._pop_lease(lease_id)
            self._filled_here[copy.owner] = copy
        self._transfer_engine.revoke(lease_id, "the embeddings are made in this process")

    def filled_here(self, key: ItemKey) -> FeatureCopy | None:
        """The copy whose room is filled here for this item. None: there is no room yet, or the item is not
        wanted from this process."""
        return self._filled_here.get(key)

    def complete(self, key: ItemKey) -> None:
        """The room of this item has been filled here."""
        self._filled_here.pop(key).move(MediaPhase.STAGED)

    def fill_elsewhere(self, key: ItemKey) -> None:
        """If the room that belongs to this item was to be filled here, another encoder gets it."""
        copy = self._filled_here.pop(key, None)
        if copy is not None:
            self._give(copy, copy.block_ids)

    def _pop_lease(self, lease_id: str) -> FeatureCopy | None:
        copy = self._by_lease.pop(lease_id, None)
        if copy is not None:
            self._given_up.pop(lease_id, None)
            copy.end_lease()
        return copy

    def _give(self, copy: FeatureCopy, block_ids: Sequence[int]) -> None:
        copy.get_room(block_ids)
        self.ask_if_wanted(copy)

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
