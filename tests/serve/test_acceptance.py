"""What the cluster promises, over HTTP, in four processes: the same code as the commands in `bench/`."""

from __future__ import annotations

import asyncio

import pytest

from bench import DEMO_MODEL, equality, soak
from bench.metrics import wait_idle
from bench.workload import make_cases
from tests.fakes.cases import Answered, Pair, part_of
from tests.fakes.slow_params import often

NUM_REQUESTS, NUM_ALL_REQUESTS = 60, 204  # in every run; in the slow test


@pytest.fixture(scope="module")
def answered() -> Answered:
    return Answered(DEMO_MODEL, 77, equality.MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(answered: Answered) -> list[Pair]:
    return answered.first(NUM_REQUESTS)


@pytest.mark.parametrize(("concurrency", "part"), [(1, 0), (8, 1), (32, 2)])
def test_greedy_answers_over_http_equal_generate(cluster_url, expected, concurrency, part):
    faults, _ = asyncio.run(equality.run(cluster_url, part_of(expected, part), concurrency))
    assert faults == []


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_all_greedy_answers_over_http_equal_generate(cluster_url, answered, concurrency):
    everything = answered.first(NUM_ALL_REQUESTS)
    faults, _ = asyncio.run(equality.run(cluster_url, everything, concurrency))
    assert faults == []


@pytest.mark.parametrize("num_requests", often([80, 1000], [80]))
def test_many_requests_with_a_fifth_cancelled_leave_nothing_behind(cluster_url, num_requests):
    cases = make_cases(78, num_requests)
    outcomes = asyncio.run(soak.run(cluster_url, cases, concurrency=16, cancelled_ratio=0.2, seed=3))
    assert wait_idle(cluster_url, timeout_s=120) == {}
    assert set(outcomes) <= {"answered", "left"} and outcomes["answered"] >= 0.8 * num_requests
    assert outcomes["left"] > 0
