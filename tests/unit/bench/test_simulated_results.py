"""What is said of a simulated run: goodput, intervals, the highest rate within limits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from deploy.simulator.hardware import H200, VL_7B
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import Misses, Outcome, Slo, interval, keeps, summarise
from deploy.simulator.search import highest_rate, leapt, rate_above, run_unless_missed
from deploy.simulator.workload import SimRequest, Workload, fixed_text
from router.policy import make_policy

SLO = Slo(2.0, 0.05)


def outcome(number: int, ttft_s: float, status: str = "finished", tpot_s: float = 0.01) -> Outcome:
    request = SimRequest(f"r{number}", float(number), 100, 11, [])
    return Outcome(request=request, status=status, ttft_s=ttft_s, tpot_s=tpot_s, finished_at=number + 1.0)


def test_goodput_counts_what_keeps_both_limits_after_the_warm_up() -> None:
    outcomes = [outcome(i, 5.0) for i in range(2)]  # a tenth of 20: warm-up
    outcomes += [outcome(i, 1.0) for i in range(2, 16)]
    outcomes += [
        outcome(16, 3.0),
        outcome(17, 1.0, tpot_s=0.2),
        outcome(18, 0.0, "refused"),
        outcome(19, 1.0),
    ]
    summary = summarise(outcomes, Slo(2.0, 0.1))
    assert summary.num_requests == 18 and summary.num_refused == 1
    assert summary.goodput == pytest.approx(15 / 17)
    assert not keeps(summary, Slo(10.0, 1.0))


def waits(load: float, seed: int, num_requests: int = 2000) -> list[Outcome]:
    """Of one server that takes a second for each of the requests, which are Poisson arrivals."""
    rng, at, free_at, found = Random(seed), 0.0, 0.0, []
    for i in range(num_requests):
        at += rng.expovariate(load)
        free_at = max(at, free_at) + 1.0
        request = SimRequest(f"r{i}", at, 100, 11, [])
        found.append(
            Outcome(request=request, status="finished", ttft_s=free_at - at, tpot_s=0.01, finished_at=free_at)
        )
    return found


@pytest.mark.parametrize(("load", "is_kept"), [(0.8, True), (0.9, True), (1.15, False), (1.2, False)])
def test_a_queue_within_loose_limits_counts_if_it_does_not_grow(load: float, is_kept: bool) -> None:
    loose = Slo(1000.0)
    found = [keeps(summarise(waits(load, seed), loose), loose) for seed in range(20)]
    assert found == [is_kept] * 20


def test_growth_is_told_for_the_whole_run() -> None:
    summary = summarise([outcome(i, 0.1 * i) for i in range(300)], SLO)
    assert summary.arrivals_s == 269 and summary.growth_s == pytest.approx(0.1 * 270)


def test_an_interval_of_five_values_uses_students_quantile() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == (3.0, pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3))
    assert interval([4.0]) == (4.0, 0.0)


@pytest.mark.parametrize("guess", [1.0, 40.0, 500.0])
def test_the_search_finds_the_highest_rate_from_any_guess(guess: float) -> None:
    def run(rate: float):
        return summarise([outcome(i, 0.1 if rate <= 42.0 else 9.0) for i in range(30)], SLO)

    rate, summary = highest_rate(run, SLO, guess)
    assert 42 / 1.04 <= rate <= 42 and summary is not None


@pytest.mark.parametrize("guess", [1.0, 20.0, 30.0, 40.0, 500.0])
def test_a_leapt_guess_finds_the_same_rate_with_fewer_runs_that_are_kept(guess: float) -> None:
    tried: set[float] = set()

    @cache
    def run(rate: float):
        tried.add(rate)
        return summarise([outcome(i, 0.1 if rate <= 42.0 else 9.0) for i in range(30)], SLO)

    found = highest_rate(run, SLO, guess)
    num_kept = sum(rate <= 42.0 for rate in tried)
    run.cache_clear()
    tried.clear()
    assert highest_rate(run, SLO, leapt(run, SLO, guess)) == found
    assert sum(rate <= 42.0 for rate in tried) <= num_kept - (2 if guess < 30.0 else 0)


@pytest.mark.parametrize("least", [0.0, 40.0, 41.9, 43.0, 55.0])
def test_one_run_says_whether_the_search_would_find_more(least: float) -> None:
    """From a guess that is kept; where the limit is, is not known."""
    for limit in range(405, 800, 7):

        def run(rate: float, limit: float = limit / 10):
            return summarise([outcome(i, 0.1 if rate <= limit else 9.0) for i in range(30)], SLO)

        rate, _ = highest_rate(run, SLO, 40.0)
        assert (rate > least) == keeps(run(rate_above(40.0, least)), SLO)


@pytest.mark.parametrize("share", [None, 0.9])
def test_a_run_is_given_up_where_its_summary_would_fail_and_not_before(share: float | None) -> None:
    rng, slo = Random(5), replace(SLO, share=share)
    given_up = set()
    for num_late in range(16):
        outcomes = [outcome(i, 0.1) for i in range(100)]
        for i in rng.sample(range(100), num_late):
            outcomes[i] = outcome(i, 9.0)
        misses = Misses([each.request for each in outcomes], slo)
        ended = rng.sample(outcomes, len(outcomes))
        is_given_up = any(
            misses.are_too_many_late(each.request, each.ttft_s) or misses.are_too_many(each) for each in ended
        )
        assert is_given_up != keeps(summarise(outcomes, slo), slo)
        given_up.add(is_given_up)
    assert given_up == {False, True}
    failed = Misses([each.request for each in outcomes], slo)
    assert failed.are_too_many(replace(outcomes[99], status="failed"))


def test_a_run_with_late_first_tokens_is_given_up_before_an_answer_ends() -> None:
    specs, policy = workers(Layout(0, 0, 0, 1), VL_7B, H200), make_policy("joint")
    workload, slo = Workload("long answers", fixed_text(400, 100_000)), Slo(0.0)
    assert run_unless_missed(specs, lambda _: policy, VL_7B, workload, 100.0, 20, 0, slo) is None


@pytest.mark.parametrize("load", [0.9, 1.2])
def test_a_run_whose_waits_grow_is_given_up_with_its_last_first_token(load: float) -> None:
    loose, found = Slo(1000.0), waits(load, 0)
    misses = Misses([each.request for each in found], loose)
    given_up = [misses.are_too_many_late(each.request, each.ttft_s) for each in found]
    assert not any(given_up[:-1]) and given_up[-1] != keeps(summarise(found, loose), loose)


def test_the_search_says_so_where_no_rate_is_good() -> None:
    bad = summarise([outcome(i, 9.0) for i in range(30)], SLO)
    assert highest_rate(lambda _: bad, SLO, 10.0) == (0.0, None)


def test_the_search_says_so_where_every_rate_is_good() -> None:
    good = summarise([outcome(i, 0.1) for i in range(30)], SLO)
    with pytest.raises(ValueError, match="simulate more"):
        highest_rate(lambda _: good, SLO, 10.0)
