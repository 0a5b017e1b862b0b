"""The verdicts of `bench.soak`: what grows is found, what only moves is not."""

from __future__ import annotations

import os
from random import Random

import pytest

from bench.client import TimedAnswer
from bench.flat import trend
from bench.soak_series import Latency, Sampler, Verdict, table, usage_of

TIMES = [float(second) for second in range(120)]


def noisy(seed: int, per_s: float = 0.0) -> list[float]:
    rng = Random(seed)
    return [1000 + per_s * time + rng.gauss(0, 5) for time in TIMES]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat_and_a_leak_in_it_is_not(seed: int) -> None:
    assert not Verdict("flat", "MiB", trend(TIMES, noisy(seed))).rises
    leak = Verdict("leak", "MiB", trend(TIMES, noisy(seed, per_s=0.7)))
    assert leak.rises and leak.trend.rise == pytest.approx(0.7 * leak.trend.span, rel=0.2)


def test_what_grows_while_caches_fill_is_flat_afterwards() -> None:
    values = [min(1000.0, 500 + 20 * time) for time in TIMES]
    assert trend(TIMES, values).rise == 0.0


def test_a_peak_is_no_trend() -> None:
    values = noisy(1)
    values[80:90] = [5000.0] * 10
    assert not trend(TIMES, values).rises(20.0)


def test_a_trend_too_small_to_matter_is_tolerated() -> None:
    assert not trend(TIMES, noisy(1, per_s=0.1)).rises(20.0)


def test_one_descriptor_per_second_grows_and_is_named() -> None:
    verdict = Verdict("door", "descriptors", trend(TIMES, TIMES))
    assert (
        verdict.rises
        and "| door | descriptors |" in table([verdict], 10.0)
        and "GROWS" in table([verdict], 10.0)
    )


def test_a_run_that_is_too_short_has_no_verdict() -> None:
    with pytest.raises(ValueError, match="too few"):
        trend([0.0, 1.0], [1.0, 1.0])


def test_latency_is_that_of_the_answers_since_the_last_sample() -> None:
    latency = Latency()
    latency.add_answer(TimedAnswer("", 10.0, [10.5, 10.6, 10.7]))
    assert latency.take() == pytest.approx({"TTFT": 500.0, "ITL": 100.0})
    assert latency.take() == {}


def test_the_usage_of_a_process_that_has_ended_is_empty() -> None:
    assert usage_of(os.getpid())["threads"] >= 1
    assert usage_of(2**22 + 1) == {}


def test_a_process_that_keeps_its_descriptors_is_found() -> None:
    """Also: a process that came later has no verdict, and nothing else of this one grows."""
    kinds = {os.getpid(): "door"}
    sampler, opened = Sampler(lambda: kinds), []
    try:
        for second in range(30):
            opened.append(os.open(os.devnull, os.O_RDONLY))
            if second == 20:
                kinds = {**kinds, 1: "other"}
            sampler.latency.add_answer(TimedAnswer("", 0.0, [0.1, 0.2]))
            sampler.sample(float(second))
    finally:
        for descriptor in opened:
            os.close(descriptor)
    verdicts = {(verdict.name, verdict.unit): verdict for verdict in sampler.verdicts()}
    assert {name for name, _ in verdicts} == {"door", "/dev/shm", "TTFT", "ITL"}
    assert verdicts["door", "descriptors"].rises
    assert not any(verdicts[key].rises for key in (("door", "threads"), ("TTFT", "ms"), ("ITL", "ms")))
