import pytest
import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.types.transfer import Grant
from prefill_service.features import FeatureStore


class FakeMover:
    """Takes note of leases."""

    def __init__(self):
        self.granted: list[str] = []
        self.cancelled: list[str] = []

    def grant(self, lease_id, block_ids, generations, ttl_s):
        self.granted.append(lease_id)
        return Grant(lease_id, b"", 0, 4, "", tuple(block_ids), tuple(generations), ttl_s)

    def cancel(self, lease_id):
        self.cancelled.append(lease_id)


class Parts:
    def __init__(self):
        self.memory = BlockMemory(feature_layout(1, 4, torch.int64), 4)
        self.pool = BlockPool(4, 4)
        self.mover = FakeMover()
        self.store = FeatureStore(self.memory, self.pool, self.mover)
        self.grants: dict[tuple[str, int], Grant] = {}

    def reserve(self, request_id, num_rows, item_idx=0):
        def send(granted):
            self.grants[granted.request_id, granted.item_idx] = granted.grant

        self.store.reserve((request_id, item_idx), num_rows, 10.0, send)

    def close(self, request_id, completed=True):
        return self.store.close_lease(self.grants[request_id, 0].lease_id, completed=completed)


@pytest.fixture
def parts():
    parts = Parts()
    yield parts
    for key in list(parts.store._items):
        parts.store.release(key)
    for grant in list(parts.grants.values()):
        parts.store.close_lease(grant.lease_id, completed=False)
    for key in list(parts.store._items):
        parts.store.release(key)
    assert parts.store.num_open_leases == 0 and parts.store.num_used_blocks == 0
    parts.pool.check_integrity()


def test_room_is_given_in_order_of_arrival_and_nobody_overtakes(parts):
    parts.reserve("first", 8)
    parts.reserve("large", 16)
    parts.reserve("small", 4)
    assert list(parts.grants) == [("first", 0)]
    assert parts.close("first") == ("first", 0)
    assert list(parts.grants) == [("first", 0)], "ready rows are still needed"
    parts.store.release(("first", 0))
    assert list(parts.grants) == [("first", 0), ("large", 0)]


def test_rows_of_a_ready_item_can_be_read_from_any_place(parts):
    parts.reserve("r", 7)
    grant = parts.grants["r", 0]
    parts.memory.segments[0][list(grant.block_ids)] = torch.arange(8).view(2, 4, 1)
    parts.close("r")
    assert parts.store.rows(("r", 0), 0, 7).flatten().tolist() == list(range(7))
    assert parts.store.rows(("r", 0), 3, 6).flatten().tolist() == [3, 4, 5]
    assert parts.store.rows(("r", 0), 5, 7).flatten().tolist() == [5, 6]


def test_an_item_released_before_its_embeddings_came_keeps_its_blocks_until_the_lease_closes(parts):
    parts.reserve("r", 16)
    parts.reserve("next", 4)
    parts.store.release(("r", 0))
    assert parts.mover.cancelled == [parts.grants["r", 0].lease_id]
    assert ("next", 0) not in parts.grants
    assert parts.close("r") is None
    assert ("next", 0) in parts.grants


def test_an_item_released_while_queued_is_never_granted_and_lets_others_pass(parts):
    parts.reserve("r", 12)
    parts.reserve("large", 16)
    parts.reserve("small", 4)
    parts.store.release(("large", 0))
    assert list(parts.grants) == [("r", 0), ("small", 0)]
    parts.store.release(("large", 0))


def test_a_writer_that_gave_up_is_told_apart_from_one_that_nobody_waited_for(parts):
    parts.reserve("r", 4)
    assert parts.close("r", completed=False) == ("r", 0)
    assert parts.close("r") is None
    assert parts.store.num_used_blocks == 1
