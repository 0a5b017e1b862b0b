"""The block pool: ownership, generations, prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.errors import BookkeepingError, OverloadedError
from cluster.kvcache.blocks import BlockPool, check_tables
from cluster.types.messages import BlocksChanged


def generation_of(pool, block_id):
    return pool.generations([block_id])[0]


def num_known(pool, hashes):
    """Length in blocks of the prefix that `lookup` would return."""
    known = set(pool.content())
    return next((i for i, name in enumerate(hashes) if name not in known), len(hashes))


def test_allocating_too_many_blocks_changes_nothing():
    pool = BlockPool(4, 16)
    assert pool.try_allocate(5) is None
    with pytest.raises(OverloadedError):
        pool.allocate(5)
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_registered_block_is_found_again_after_it_is_freed():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"b")
    generations = pool.generations(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.lookup([b"a", b"b", b"c"]) == blocks
    assert pool.generations(blocks) == generations
    pool.free(blocks)
    pool.check_integrity()


def test_lookup_stops_at_the_first_unknown_hash():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.register(blocks[1], b"b")
    assert pool.lookup([b"a", b"b"]) == []
    pool.free(blocks)


def test_blocks_that_requests_hold_are_counted_up_to_the_first_unknown_hash():
    pool = BlockPool(5, 16)
    blocks = pool.allocate(4)
    for block_id, name in zip(blocks, (b"a", b"b", b"c", b"e"), strict=True):
        pool.register(block_id, name)
    assert pool.num_held([b"a", b"b", b"c", b"d", b"e"]) == 3
    pool.free(blocks[1:2])
    assert pool.num_held([b"a", b"b", b"c", b"d", b"e"]) == 2
    assert pool.num_free == 2 and pool.num_cached == 1
    pool.free([blocks[0], *blocks[2:]])


def test_the_least_recently_used_cached_block_is_evicted_and_tails_before_heads():
    pool = BlockPool(3, 16)
    first = pool.allocate(2)
    pool.register(first[0], b"head")
    pool.register(first[1], b"tail")
    pool.free(first)
    (never_used,) = pool.allocate(1)
    (evicted,) = pool.allocate(1)
    assert never_used not in first
    assert evicted == first[1]
    assert num_known(pool, [b"head", b"tail"]) == 1
    pool.free([never_used, evicted])
    pool.check_integrity()


def test_a_block_gets_a_new_generation_when_its_content_is_lost():
    pool = BlockPool(1, 16)
    (block,) = pool.allocate(1)
    before = generation_of(pool, block)
    pool.free([block])
    assert pool.allocate(1) == [block]
    assert generation_of(pool, block) > before
    pool.free([block])


def test_freeing_a_free_block_is_an_error():
    pool = BlockPool(1, 16)
    with pytest.raises(ValueError, match="no request holds it"):
        pool.free([0])


def test_the_second_block_of_equal_content_stays_private():
    pool = BlockPool(2, 16)
    one, two = pool.allocate(2)
    pool.register(one, b"a")
    pool.register(two, b"a")
    pool.free([one, two])
    assert pool.num_cached == 1
    assert pool.lookup([b"a"]) == [one]
    pool.free([one])
    pool.forget_all()
    assert pool.num_cached == 0
    pool.check_integrity()


def test_a_pool_that_is_watched_tells_what_came_and_what_went():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"before")
    pool.watch()
    pool.register(blocks[1], b"a")
    assert pool.content() == (b"before", b"a")
    assert pool.take_changes() == BlocksChanged((b"a",), ())
    pool.free(blocks)
    pool.register(pool.allocate(1)[0], b"b")  # in the place of the tail
    assert pool.take_changes() == BlocksChanged((b"b",), (b"a",))
    pool.free(pool.lookup([b"b"]))
    assert pool.take_changes() is None
    pool.forget_all()
    changes = pool.take_changes()
    assert changes is not None and changes.added == () and set(changes.evicted) == {b"before", b"b"}


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model: content is (block, generation) -> hash, and must never change while it is
    findable.
    """

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.held: list[list[int]] = []
        self.content: dict[bytes, tuple[int, int]] = {}
        self.told: set[bytes] = set()  # the content, as far as `take_changes` tells
        self.pool.watch()

    @rule(n=st.integers(0, 7))
    def allocate(self, n):
        free = self.pool.num_free
        blocks = self.pool.try_allocate(n)
        assert (blocks is None) == (n > free)
        if blocks:
            assert len(set(blocks)) == n
            assert not any(block in other for other in self.held for block in blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data, name):
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        try:
            self.pool.register(block, name)
        except ValueError:
            return  # this block has other content
        if num_known(self.pool, [name]):
            found = self.pool.lookup([name])
            self.content.setdefault(name, (found[0], generation_of(self.pool, found[0])))
            self.pool.free(found)

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4, unique=True))
    def lookup(self, names):
        expected = num_known(self.pool, names)
        found = self.pool.lookup(names)
        assert len(found) == expected
        for name, block in zip(names, found, strict=False):
            old_block, old_generation = self.content[name]
            if (block, generation_of(self.pool, block)) != (old_block, old_generation):
                # evicted and registered again: the old name of the content must be dead
                assert generation_of(self.pool, old_block) > old_generation or old_block != block
                self.content[name] = (block, generation_of(self.pool, block))
        if found:
            self.held.append(found)

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        assert self.pool.num_cached == 0
        self.content.clear()

    @rule()
    def hear_of_changes(self):
        changes = self.pool.take_changes()
        if changes is not None:
            assert not set(changes.added) & set(changes.evicted)
            self.told = (self.told | set(changes.added)) - set(changes.evicted)
        assert self.told == set(self.pool.content())
        assert self.pool.take_changes() is None

    @invariant()
    def tables_agree(self):
        self.pool.check_integrity()
        assert self.pool.num_referenced == len({block for blocks in self.held for block in blocks})

    def teardown(self):
        for blocks in self.held:
            self.pool.free(blocks)
        assert self.pool.num_free == self.pool.num_blocks
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_shared_block_is_free_when_the_last_holder_gives_it_back():
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 2
    pool.free(blocks)
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="no request holds it"):
        pool.share(blocks)
    pool.check_integrity()


def test_an_evicted_block_gets_a_new_generation():
    """A grant that names the block as it was must not fit it any more."""
    pool = BlockPool(2, 16)
    cached, held = pool.allocate(2)
    pool.register(cached, b"known")
    before = pool.generations([cached, held])
    pool.free([cached])
    assert pool.generations([cached]) == before[:1], "its content is still there"
    assert pool.allocate(1) == [cached]
    assert generation_of(pool, cached) > before[0] and generation_of(pool, held) == before[1]
    pool.free([cached, held])


# Tables of a pool of 5 blocks: 3 and 4 are free, 0 and 1 cached, 2 is held.
FREE, NUM_REFERENCES, CACHED = (3, 4), (0, 0, 1, 0, 0), (0, 1)
HASH_OF, BLOCK_OF = (b"a", b"b", b"c", None, None), {b"a": 0, b"b": 1, b"c": 2}


def test_tables_that_agree_have_no_fault():
    check_tables(FREE, NUM_REFERENCES, HASH_OF, BLOCK_OF, CACHED)


@pytest.mark.parametrize(
    ("fault", "tables"),
    [
        ("a block is on the free list twice", ((3, 4, 3), NUM_REFERENCES, HASH_OF, BLOCK_OF, CACHED)),
        ("a block has two states", (FREE, (1, 0, 1, 0, 0), HASH_OF, BLOCK_OF, CACHED)),
        ("a block has two states", (FREE, (0, 0, 1, 1, 0), HASH_OF, BLOCK_OF, CACHED)),
        ("a block has two states", ((3, 4, 0), NUM_REFERENCES, HASH_OF, BLOCK_OF, CACHED)),
        ("a block has no state", ((4,), NUM_REFERENCES, HASH_OF, BLOCK_OF, CACHED)),
        ("a reference count is negative", ((4,), (0, 0, 1, -1, 0), HASH_OF, BLOCK_OF, CACHED)),
        (
            "hash tables disagree",
            (FREE, NUM_REFERENCES, (b"a", b"b", b"other", None, None), BLOCK_OF, CACHED),
        ),
        ("hash tables disagree", (FREE, NUM_REFERENCES, (b"a", b"b", b"c", b"d", None), BLOCK_OF, CACHED)),
        (
            "a cached block has no hash",
            (FREE, NUM_REFERENCES, (None, b"b", b"c", None, None), {b"b": 1, b"c": 2}, CACHED),
        ),
        (
            "a free block has a hash",
            (FREE, NUM_REFERENCES, (b"a", b"b", b"c", b"d", None), {**BLOCK_OF, b"d": 3}, CACHED),
        ),
    ],
)
def test_each_fault_of_the_tables_is_found(fault, tables):
    with pytest.raises(BookkeepingError, match=fault):
        check_tables(*tables)


def test_a_reset_makes_every_block_free_whatever_its_state():
    pool = BlockPool(5, 16)
    first, second, held = pool.allocate(3)
    pool.note_cached()
    for block_id, block_hash in ((first, b"a"), (second, b"b"), (held, b"c")):
        pool.register(block_id, block_hash)
    pool.free([first, second])
    pool.watch()
    generations = pool.generations(range(5))
    pool.reset()
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached, pool.lookup([b"a"]), pool.take_cached()) == (5, 0, [], [])
    assert all(new > old for new, old in zip(pool.generations(range(5)), generations, strict=True))
    changes = pool.take_changes()
    assert changes is not None and (set(changes.evicted), changes.added) == ({b"a", b"b", b"c"}, ())
