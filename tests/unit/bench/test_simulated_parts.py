"""What a simulated cluster is made of: events, rests, leases, workloads, curves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deploy.simulator.events import EventLoop
from deploy.simulator.hardware import A100, BLOCK_SIZE, H200, VL_7B, curves, num_kv_blocks
from deploy.simulator.workload import (
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


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_requests_of_a_workload_are_well_formed(workload: Workload) -> None:
    requests = list(workload.requests(100, 300, seed=3))
    assert [r.arrived_at for r in requests] == sorted(r.arrived_at for r in requests)
    assert requests[-1].arrived_at == pytest.approx(3, rel=0.4)
    for request in requests:
        assert len(request.block_keys) == request.num_prompt_tokens // BLOCK_SIZE
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
