"""What is said of a simulated run: goodput, intervals, the highest rate within limits."""

from __future__ import annotations

import pytest

from cluster.simulator.outcome import Outcome
from cluster.simulator.results import Slo, interval, keeps, summarise
from cluster.simulator.search import highest_rate
from cluster.simulator.workload import SimRequest

SLO = Slo(2.0, 0.05)


def outcome(number: int, ttft_s: float, status: str = "finished", tpot_s: float = 0.01) -> Outcome:
    request = SimRequest(f"r{number}", float(number), 100, 11, [])
    return Outcome(request, status, ttft_s=ttft_s, tpot_s=tpot_s, finished_at=number + 1.0)


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


def test_a_queue_that_only_grows_keeps_no_promise() -> None:
    growing = summarise([outcome(i, 0.001 * i) for i in range(300)], SLO)
    steady = summarise([outcome(i, 0.1) for i in range(300)], SLO)
    assert growing.ttft_p99_s < SLO.ttft_s and not keeps(growing, SLO)
    assert keeps(steady, SLO)


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


def test_the_search_says_so_where_no_rate_is_good() -> None:
    bad = summarise([outcome(i, 9.0) for i in range(30)], SLO)
    assert highest_rate(lambda _: bad, SLO, 10.0) == (0.0, None)


def test_the_search_says_so_where_every_rate_is_good() -> None:
    good = summarise([outcome(i, 0.1) for i in range(30)], SLO)
    with pytest.raises(ValueError, match="simulate more"):
        highest_rate(lambda _: good, SLO, 10.0)
