"""A feature store alone: a transfer engine that records leases, doors that are lists."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from cluster.engine.features import FeatureStore
from cluster.engine.shared_copies import FeatureCopy
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.types.media_phase import MediaPhase
from cluster.types.messages import FeatureGranted, FeatureShared
from cluster.types.transfer import Contract, Grant

NUM_BLOCKS = 4
CONTRACT = Contract(0, "", 4, (), "raw", "")
GRANTED, SHARED = FeatureGranted.__name__, FeatureShared.__name__


class FakeMover:
    """Records leases."""

    def __init__(self):
        self.granted: list[str] = []
        self.cancelled: list[str] = []

    def grant(self, lease_id, block_ids, generations, ttl_s):
        self.granted.append(lease_id)
        return Grant(lease_id, b"", 0, NUM_BLOCKS, CONTRACT, tuple(block_ids), tuple(generations), ttl_s)

    def cancel(self, lease_id):
        self.cancelled.append(lease_id)


class Parts:
    def __init__(self):
        self.memory = BlockMemory(feature_layout(1, 4, torch.int64), NUM_BLOCKS)
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.transfer_engine: Any = FakeMover()
        self.store = FeatureStore(self.memory, self.pool, self.transfer_engine)
        self.told: dict[tuple[str, int], list[str]] = defaultdict(list)  # kinds of message, per item
        self.grants: dict[tuple[str, int], Grant] = {}
        self.blocks_of: dict[str, list[int]] = {}  # per lease
        self.open_leases: list[str] = []
        self.names: set[tuple[str, int]] = set()  # of copies

    def reserve(self, request_id, num_rows, item_idx=0, media_hash="", *, is_wanted=True):
        """An item of its own, unless it is named."""
        key = (request_id, item_idx)

        def tell(message):
            assert (message.request_id, message.item_idx) == key
            self.told[key].append(type(message).__name__)
            if isinstance(message, FeatureGranted):
                self.grants[key] = message.grant
                self.blocks_of[message.grant.lease_id] = list(message.grant.block_ids)
                self.open_leases.append(message.grant.lease_id)

        self.names.add((media_hash or f"{key}", num_rows))
        self.store.reserve(key, media_hash or f"{key}", num_rows, 10.0, tell, is_wanted=is_wanted)

    def close(self, request_id, completed=True):
        return self.close_lease(self.grants[request_id, 0].lease_id, completed=completed)

    def close_lease(self, lease_id, *, completed):
        if lease_id in self.open_leases:  # else it is closed once more
            self.open_leases.remove(lease_id)
        return self.store.close_lease(lease_id, completed=completed)

    @property
    def queued(self) -> list[FeatureCopy]:
        """Copies that wait for room."""
        copies = {id(copy): copy for copy in self.store.copies.values()}
        return [copy for copy in copies.values() if copy.phase is MediaPhase.QUEUED]

    def let_go(self):
        """Every request leaves, every lease ends; nothing may be left."""
        for key in list(self.store.copies):
            self.store.release(key, has_ended=True)
        while self.open_leases:
            assert self.close_lease(self.open_leases[0], completed=False) == []
        assert self.store.num_open_leases == 0 and self.store.num_used_blocks == 0
        assert all(self.store.copies.newest(name) is None for name in self.names)
        assert not self.store.copies
        self.pool.check_integrity()
