"""The placement of least cost."""

import random
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.policy import JointPolicy
from router.policy import estimate as estimate_module
from router.policy.estimate import Estimate
from router.policy.search import MAX_PREFILLS, MAX_STEPS, Search
from tests.fakes.placement import (
    all_placements,
    cluster_of,
    cost_of,
    is_legal,
    load,
    media,
    random_cluster,
    text,
)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 2))
@example(
    1644, 1, 0
)  # waiting longer for the one item costs nothing, because its KV is on its way for longer still
def test_the_search_finds_what_looking_at_everything_finds(seed, num_items, num_languages):
    rng = random.Random(seed)
    first = 0 if num_languages else 1  # there may be language workers alone
    sizes = (
        rng.randrange(1, 5 if num_items < 3 else 4),
        rng.randrange(first, 4 - num_languages),
        rng.randrange(first, 4 - num_languages),
        num_languages,
    )
    cluster = random_cluster(rng, sizes, codecs=("raw", "int8"))
    rows = [rng.choice([40, 400, 1000, 4000]) for _ in range(num_items)]
    negative: dict[str, Any] = {"num_negative_tokens": rng.choice([0, 16])}
    request = media(*rows, num_before=rng.choice([0, 16, 400]), **negative) if rows else text(400, **negative)
    for item in request.media:
        if rng.random() < 0.3:
            cluster.media_changed(f"e{rng.randrange(sizes[0])}", [item.media_hash], [])
    if rng.random() < 0.5:
        cached = request.block_hashes[: rng.randrange(len(request.block_hashes) + 1)]
        cluster.blocks_changed(rng.choice(sorted(cluster.prefills.slots)), cached, [])
    estimate = Estimate(request, cluster, 1.0)
    least = min(cost_of(estimate, placement) for placement in all_placements(request, cluster))
    found = Search(estimate, max_prefills=len(cluster.prefills)).best()
    assert found.cost_s == pytest.approx(least) and least < float("inf")
    decision = JointPolicy().decide(request, cluster, 1.0)
    assert is_legal(decision.placement, request, cluster)
    if len(cluster.prefills) <= MAX_PREFILLS:
        assert cost_of(estimate, decision.placement) == pytest.approx(least)


def test_the_bounds_leave_little_to_look_at():
    rng, num_visited, num_workers = random.Random(3), 0, 60
    cluster = random_cluster(rng, (num_workers, num_workers, num_workers))
    for idx in range(40):
        each = Search(Estimate(media(400, 1000, name=f"r{idx}"), cluster, 1.0))
        each.best()
        num_visited += each.num_visited
    assert num_visited / 40 < num_workers / 10


def test_a_decision_looks_at_few_placements_however_many_there_are_and_misses_little():
    """Equal workers with unequal queues: bounds say little, for all items would go to the same encoder."""
    rng, cluster = random.Random(2), cluster_of(24, 24, 24)
    for prefix in "ep":
        for idx in range(24):
            cluster.reported(f"{prefix}{idx}", load(rng.randint(0, 4000), rng.randint(1, 9)), 1.0)
    requests = [media(*[rng.randint(200, 900) for _ in range(4)], name=f"r{idx}") for idx in range(10)]
    estimates = [Estimate(request, cluster, 1.0) for request in requests]
    searches = [Search(estimate) for estimate in estimates]
    found_s = [each.best().cost_s for each in searches]
    assert all(each.num_steps <= MAX_STEPS for each in searches)
    assert all(each.num_visited <= MAX_PREFILLS for each in searches)
    least = [Search(estimate, max_prefills=24, max_steps=10**6) for estimate in estimates]
    least_s = [each.best().cost_s for each in least]
    assert sum(each.num_steps for each in least) > 5 * sum(each.num_steps for each in searches)
    assert sum(found_s) <= 1.015 * sum(least_s)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_ties_cost_no_more_than_they_may(seed):
    cluster, request = random_cluster(random.Random(seed), (3, 3, 2)), media(400, 1000)
    with mock.patch.object(estimate_module, "TIE_RATIO", 0.0):
        estimate = Estimate(request, cluster, 1.0)
    least = min(cost_of(estimate, placement) for placement in all_placements(request, cluster))
    chosen = JointPolicy().decide(request, cluster, 1.0).placement
    allowed = 4 * estimate_module.TIE_RATIO * float(estimate.prefills.text_s.min())
    assert cost_of(estimate, chosen) <= least + allowed


def test_items_of_a_request_wait_for_one_another_even_where_its_first_token_does_not():
    """Prefill's queue is long, so encoding in turn at one encoder would delay nothing but later requests."""
    cluster = cluster_of(2, 1, 1)
    cluster.reported("p0", load(40_000, 40), 0.0)
    for idx in range(20):
        request = media(400, 400, name=f"r{idx}")
        assert sorted(JointPolicy().decide(request, cluster, 0.0).placement.encoders) == ["e0", "e1"]
