"""What the cluster promises, over HTTP, in four processes: the same code as the commands in `bench/`."""

from __future__ import annotations

import asyncio

import pytest

from bench import equality, soak
from bench.workload import Answer, Case, Reference, make_cases

NUM_REQUESTS = 204
NUM_SOAK_REQUESTS = 1000


@pytest.fixture(scope="module")
def expected() -> list[tuple[Case, Answer]]:
    reference = Reference(equality.MODEL)
    return [(case, reference.answer(case, equality.MAX_TOKENS)) for case in make_cases(77, NUM_REQUESTS)]


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_greedy_answers_over_http_equal_generate(cluster_url, expected, concurrency):
    faults, _ = asyncio.run(equality.run(cluster_url, expected, concurrency))
    assert faults == []


def test_a_thousand_requests_with_a_fifth_cancelled_leave_nothing_behind(cluster_url):
    cases = make_cases(78, NUM_SOAK_REQUESTS)
    outcomes = asyncio.run(soak.run(cluster_url, cases, concurrency=16, cancelled_ratio=0.2, seed=3))
    assert soak.wait_idle(cluster_url, timeout_s=30) == {}
    assert set(outcomes) <= {"answered", "left"} and outcomes["answered"] >= 0.8 * NUM_SOAK_REQUESTS
    assert outcomes["left"] > 0
