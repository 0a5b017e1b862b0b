"""What a simulated cluster is made of: events, caches, workloads, curves."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.simulator.caches import BlockCache, Changes, MediaCache
from cluster.simulator.events import EventLoop
from cluster.simulator.hardware import A100, BLOCK_SIZE, H200, VL_7B, curves, num_kv_blocks
from cluster.simulator.workload import (
    WORKLOADS,
    Draft,
    Workload,
    block_keys,
    images,
)


def test_events_run_in_order_of_time_then_of_planning() -> None:
    loop, ran = EventLoop(), []
    for name, when in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        loop.at(when, ran.append, name)
    loop.run(until=1.5)
    assert ran == ["a", "b"]
    loop.run()
    assert (ran, loop.now) == (["a", "b", "c"], 2.0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=30))
def test_a_block_cache_holds_what_is_held_and_never_more_than_it_has(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Prompts of four streams come, are computed and leave in any order."""
    cache, held = BlockCache(8), []
    known: set[bytes] = set()
    for stream, num_blocks, is_leaving in steps:
        if is_leaving and held:
            cache.free(*held.pop(0))
        else:
            keys = [bytes([stream, i]) for i in range(num_blocks)]
            shared = keys[: cache.match(keys)]
            if cache.try_take(shared, num_blocks - len(shared)):
                named = [key for key in keys[len(shared) :] if cache.name(key)]
                held.append((shared + named, num_blocks - len(shared) - len(named)))
        added, evicted = cache.changes.take()
        known = (known | set(added)) - set(evicted)
        assert cache.num_used + cache.num_cached <= 8
        assert all(cache.match([key]) == 1 for key in known)
        assert len(known) == cache.num_used - cache.num_anonymous + cache.num_cached
    for each in held:
        cache.free(*each)
    assert cache.num_used == 0


def test_a_media_cache_gives_up_what_was_used_longest_ago() -> None:
    cache = MediaCache(100)
    assert cache.add("a", 60) == [] and cache.add("b", 40) == []
    assert cache.use("a") and not cache.use("c")
    assert cache.add("c", 30) == ["b"]
    assert cache.add("too large", 200) == ["a", "c", "too large"]


def test_embeddings_that_are_not_expected_again_go_first() -> None:
    cache = MediaCache(100)
    assert cache.add("kept", 40) == []
    assert cache.add("new", 40, keep=False) == [] and cache.use("new")
    assert cache.make_room(30) == ["new"] and cache.add("newer", 30, keep=False) == []
    assert cache.use("newer", keep=True)  # now it is expected, and the last to go
    assert cache.add("last", 50) == ["kept"]


def test_what_came_and_went_between_two_reports_is_not_told() -> None:
    changes = Changes()
    changes.add("a")
    changes.evict("a")
    changes.evict("b")
    changes.add("c")
    assert changes.take() == (("c",), ("b",))
    assert changes.take() == ((), ())


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_requests_of_a_workload_are_well_formed(workload: Workload) -> None:
    requests = list(workload.requests(100, 300, seed=3))
    assert [r.arrived_at for r in requests] == sorted(r.arrived_at for r in requests)
    assert requests[-1].arrived_at == pytest.approx(3, rel=0.4)
    for request in requests:
        assert len(request.block_hashes) == request.num_prompt_tokens // BLOCK_SIZE
        ends = [0, *(item.end for item in request.media)]
        assert all(item.start >= end for item, end in zip(request.media, ends[:-1], strict=True))
        assert ends[-1] < request.num_prompt_tokens


def test_prompts_of_one_stream_share_the_keys_of_their_common_prefix_only() -> None:
    one, two = (Draft(10 * BLOCK_SIZE, 1, stream=7, num_shared_tokens=3 * BLOCK_SIZE + 5) for _ in range(2))
    first, second = block_keys(one, 1), block_keys(two, 2)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 3 + [False] * 7


def test_bursts_have_the_same_rate_and_more_variable_gaps() -> None:
    gaps = {}
    for name in ("text", "bursty-text"):
        at = [request.arrived_at for request in WORKLOADS[name].requests(100, 4000, 0)]
        gaps[name] = [b - a for a, b in pairwise(at)]
    squares = {name: sum(g * g for g in each) / len(each) / 0.01**2 for name, each in gaps.items()}
    assert squares["text"] == pytest.approx(2, rel=0.15)  # Poisson: 1 + 1
    assert squares["bursty-text"] == pytest.approx(5, rel=0.3)


def test_curves_grow_with_work_and_slow_accelerators_hold_less() -> None:
    found = curves(VL_7B, H200, "epd")
    assert found.prefill is not None and found.decode is not None
    assert found.prefill.seconds(2000) < found.prefill.seconds(2000, 1000) < found.prefill.seconds(4000, 1000)
    assert 0 < num_kv_blocks(VL_7B, A100) < num_kv_blocks(VL_7B, H200)


def test_images_follow_each_other_in_the_prompt() -> None:
    items = images(first=5, count=3, num_rows=10, start=100)
    assert [(i.media_hash, i.start, i.end) for i in items] == [
        ("image-5", 100, 110),
        ("image-6", 110, 120),
        ("image-7", 120, 130),
    ]


def test_the_simulator_is_ready_without_torch() -> None:
    """It keeps the engine's records, and starts in a fraction of a second."""
    code = "import sys, cluster.simulator.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
