import pytest
import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.types.messages import CacheChanged
from encoder_service.cache import EmbeddingCache

NUM_BLOCKS, ROWS_PER_BLOCK = 4, 4


@pytest.fixture
def parts():
    memory = BlockMemory(feature_layout(2, ROWS_PER_BLOCK, torch.float32), NUM_BLOCKS)
    pool = BlockPool(NUM_BLOCKS, ROWS_PER_BLOCK)
    cache = EmbeddingCache(memory, pool)
    yield cache, memory
    pool.check_integrity()
    assert cache.num_held_blocks == 0
    assert cache.num_cached_blocks == pool.num_referenced


def rows(num_rows: int, value: float) -> torch.Tensor:
    return torch.full((num_rows, 2), value)


def insert(cache: EmbeddingCache, media_hash: str, values: torch.Tensor, *, keep: bool = True) -> bool:
    if not cache.try_reserve(media_hash, len(values)):
        return False
    cache.write(media_hash, 0, values)
    cache.complete(media_hash, len(values), keep=keep)
    return True


def content(cache: EmbeddingCache, memory: BlockMemory, media_hash: str) -> list[float]:
    found = memory.segments[0][cache.pin(media_hash)].flatten(0, 1)[:, 0].tolist()
    cache.unpin(media_hash)
    return found


def test_rows_are_kept_and_the_last_block_is_padded_with_zeros(parts):
    cache, memory = parts
    memory.segments[0].fill_(9.0)
    assert insert(cache, "a", rows(6, 5.0))
    assert content(cache, memory, "a") == [5.0] * 6 + [0.0] * 2


@pytest.mark.parametrize("cuts", [(3,), (4,), (1, 2, 9), (5, 8)])
def test_rows_written_piece_by_piece_are_the_rows_written_at_once(parts, cuts):
    cache, memory = parts
    whole = torch.arange(20.0).view(10, 2)
    assert cache.try_reserve("a", 10)
    for start, end in zip((0, *cuts), (*cuts, 10), strict=True):
        assert "a" not in cache
        cache.write("a", start, whole[start:end])
    cache.complete("a", 10)
    assert content(cache, memory, "a")[:10] == whole[:, 0].tolist()


def test_the_item_used_longest_ago_leaves_first(parts):
    cache, _ = parts
    assert insert(cache, "a", rows(8, 1)) and insert(cache, "b", rows(8, 2))
    cache.pin("a")
    cache.unpin("a")
    assert insert(cache, "c", rows(8, 3))
    assert "a" in cache and "b" not in cache and "c" in cache


def test_a_pinned_item_stays_and_makes_others_wait(parts):
    cache, _ = parts
    assert insert(cache, "a", rows(8, 1))
    cache.pin("a")
    cache.pin("a")
    assert cache.num_free_blocks == 2 and not cache.try_reserve("b", 9)
    cache.unpin("a")
    assert not cache.try_reserve("b", 9)
    cache.unpin("a")
    assert insert(cache, "b", rows(9, 2)) and "a" not in cache


def test_room_that_is_being_filled_is_held_until_it_is_abandoned(parts):
    cache, _ = parts
    assert cache.try_reserve("a", 8) and cache.num_held_blocks == 2
    assert not cache.try_reserve("b", 9)
    cache.free_reserved("a")
    cache.free_reserved("a")
    assert insert(cache, "b", rows(16, 2))


def test_what_is_not_expected_again_makes_room_first_whenever_it_came(parts):
    cache, _ = parts
    for name, keep in (("old", True), ("passing", False), ("wanted later", False), ("new", True)):
        assert insert(cache, name, rows(4, 1), keep=keep)
    cache.keep("wanted later")
    cache.pin("passing")
    cache.unpin("passing")
    for name, expected in (
        ("first", {"old", "wanted later", "new", "first"}),
        ("second", {"wanted later", "new", "first", "second"}),
    ):
        assert insert(cache, name, rows(4, 1))
        assert set(cache.content()) == expected


def test_changes_are_told_once_and_name_what_is_there_in_the_end(parts):
    cache, _ = parts
    assert insert(cache, "a", rows(8, 1)) and insert(cache, "b", rows(8, 1))
    assert cache.take_changes() == CacheChanged(("a", "b"), ())
    assert cache.take_changes() is None
    assert insert(cache, "c", rows(16, 1))
    cache.note("coming")
    cache.note("not coming after all")
    assert cache.take_changes(coming={"coming"}) == CacheChanged(
        ("c", "coming"), ("a", "b", "not coming after all")
    )
    assert cache.content() == ("c",)


def test_an_item_that_is_not_cached_cannot_be_pinned(parts):
    with pytest.raises(KeyError):
        parts[0].pin("a")
