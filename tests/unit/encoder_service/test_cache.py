import pytest
import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from encoder_service.cache import EmbeddingCache

NUM_BLOCKS, ROWS_PER_BLOCK = 4, 4


@pytest.fixture
def parts():
    memory = BlockMemory(feature_layout(2, ROWS_PER_BLOCK, torch.float32), NUM_BLOCKS)
    pool = BlockPool(NUM_BLOCKS, ROWS_PER_BLOCK)
    cache = EmbeddingCache(memory, pool)
    yield cache, memory
    pool.check_integrity()
    assert cache.num_pinned_blocks == 0
    assert cache.num_cached_blocks == pool.num_referenced


def rows(num_rows: int, value: float) -> torch.Tensor:
    return torch.full((num_rows, 2), value)


def test_rows_are_kept_and_the_last_block_is_padded_with_zeros(parts):
    cache, memory = parts
    assert cache.try_insert("a", rows(6, 5.0))
    blocks = memory.segments[0][cache.pin("a")].flatten(0, 1)
    assert (blocks[:6] == 5).all() and (blocks[6:] == 0).all()
    cache.unpin("a")


def test_the_item_used_longest_ago_leaves_first(parts):
    cache, _ = parts
    assert cache.try_insert("a", rows(8, 1)) and cache.try_insert("b", rows(8, 2))
    cache.pin("a")
    cache.unpin("a")
    assert cache.try_insert("c", rows(8, 3))
    assert "a" in cache and "b" not in cache and "c" in cache


def test_a_pinned_item_stays_and_makes_others_wait(parts):
    cache, _ = parts
    assert cache.try_insert("a", rows(8, 1))
    cache.pin("a")
    cache.pin("a")
    assert not cache.has_room(9) and not cache.try_insert("b", rows(9, 2))
    cache.unpin("a")
    assert not cache.has_room(9)
    cache.unpin("a")
    assert cache.try_insert("b", rows(9, 2)) and "a" not in cache


def test_an_item_that_is_not_cached_cannot_be_pinned(parts):
    with pytest.raises(KeyError):
        parts[0].pin("a")
