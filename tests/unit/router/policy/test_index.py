"""Who holds what."""

import itertools
import random
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import index as index_module
from router.policy.index import HolderIndex, slots_of

KEYS = [f"k{i}".encode() for i in range(6)]


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_depths_are_those_of_a_plain_set_per_worker(seed):
    rng = random.Random(seed)
    index, sets = HolderIndex[bytes](), [set() for _ in range(40)]
    for _ in range(100):
        slot, keys = rng.randrange(40), rng.sample(KEYS, rng.randrange(1, 6))
        if rng.random() < 0.8:
            index.add(slot, keys)
            sets[slot].update(keys)
        elif rng.random() < 0.5:
            index.discard(slot, keys)
            sets[slot].difference_update(keys)
        else:
            index.drop(slot)
            sets[slot].clear()
    expected = [next((d for d, key in enumerate(KEYS) if key not in held), len(KEYS)) for held in sets]
    assert index.depths(KEYS, 40).tolist() == expected
    assert [index.depth(KEYS, slot) for slot in range(40)] == expected
    for key in KEYS:
        assert slots_of(index.holders(key)).tolist() == [s for s, held in enumerate(sets) if key in held]


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_depths_reach_to_the_last_end_that_a_worker_has(seed):
    rng, ends = random.Random(seed), [f"end {key}".encode() for key in KEYS]
    index, sets = HolderIndex[bytes](), [set[bytes]() for _ in range(40)]
    for slot, held in enumerate(sets):
        held.update(rng.sample(KEYS + ends, rng.randrange(1, 12)), KEYS[: rng.randrange(7)])
        index.add(slot, held)
    expected = []
    for held in sets:
        depth = next((d for d, key in enumerate(KEYS) if key not in held), len(KEYS))
        expected.append(max((d + 1 for d in range(depth) if ends[d] in held), default=0))
    assert index.depths(KEYS, 40, ends=ends).tolist() == expected
    assert [index.depth(KEYS, slot, ends) for slot in range(40)] == expected


def test_nothing_matches_a_prompt_without_full_blocks():
    index = HolderIndex[bytes]()
    index.add(0, KEYS)
    assert index.depths([], 3).tolist() == [0, 0, 0]


def test_what_is_expected_twice_is_expected_until_both_have_ended():
    index = HolderIndex[str]()
    index.expect(3, ["a"])
    index.expect(3, ["a"])
    index.unexpect(3, ["a", "b"])
    assert slots_of(index.holders("a")).tolist() == [3]
    assert np.flatnonzero(index.expecting("a", 5)).tolist() == [3]
    index.unexpect(3, ["a"])
    assert index.holders("a") == 0


def test_what_is_known_outlives_what_was_expected_and_a_dropped_slot_has_neither():
    index = HolderIndex[str]()
    index.expect(1, ["a", "b"])
    index.add(1, ["a"])
    index.unexpect(1, ["a", "b"])
    assert index.holders("a") == 0b10
    index.expect(1, ["b"])
    index.drop(1)
    assert (index.holders("a"), index.holders("b")) == (0, 0)


def test_its_memory_is_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(index_module, "MAX_KEYS", 3)
    index = HolderIndex[str]()
    index.add(0, ["a", "b"])
    index.add(1, ["a", "c", "d"])
    assert len(index) == 3
    assert index.holders("a") == 0
    index.discard(1, ["a"])
    assert index.holders("d") == 0b10


def test_forgetting_costs_no_more_however_many_have_gone(monkeypatch):
    """Of a full index. A plain dict looks at all that are gone to find its first key."""
    monkeypatch.setattr(index_module, "MAX_KEYS", 200_000)
    index, fresh = HolderIndex[bytes](), itertools.count()

    def add_s(num_keys: int) -> float:
        keys = [next(fresh).to_bytes(4) for _ in range(num_keys)]
        began_s = time.process_time()
        index.add(3, keys)
        return time.process_time() - began_s

    add_s(200_000)
    first_s = min(add_s(1000) for _ in range(3))
    add_s(100_000)
    assert min(add_s(1000) for _ in range(3)) < 10 * first_s  # a plain dict: some 25 times
    assert len(index) == 200_000
