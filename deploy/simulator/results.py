"""What became of the requests of a run, each and in numbers; and of several runs, with confidence intervals.
Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from deploy.simulator.workload import SimRequest
from router.policy import Prediction

WARM_UP_SHARE = 0.1  # of the requests, in order of arrival, do not count
# Two-sided 95 % quantiles of Student's t with n - 1 degrees of freedom, for n values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request. Instants are seconds of the run, durations are seconds. A request without a
    first token has zeros."""

    request: SimRequest
    status: str  # finished, refused (by admission), failed
    waited_s: float = 0.0  # at the door, for admission
    ttft_s: float = 0.0
    second_s: float = 0.0  # arrival to the second token
    finished_at: float
    tpot_s: float = 0.0
    num_attempts: int = 1
    num_cached: int = 0  # prompt tokens
    decided_ttft_s: float = 0.0  # start of the first attempt to the first token
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good; and the part of all requests that must, both limits
    together (as in DistServe, OSDI 2024). None: the 99th percentile of each limit by itself."""

    ttft_s: float
    tpot_s: float = math.inf
    share: float | None = None


@dataclass(frozen=True)
class Summary:
    """Figures of the requests that arrived after the warm-up. Times in seconds, of those that finished; rates
    per second of arrivals' time.

    arrivals_s       from the first arrival to the last
    growth_s         by how much the time to first token grew in that time, if it grew all the time as between
                     the last two thirds of the requests
    mape, coverage   of the policy's predictions of the time to first token: mean absolute percentage error,
                     and the share inside the predicted interval
    """

    num_requests: int
    num_finished: int
    num_refused: int
    num_failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    second_mean_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    waited_p99_s: float
    goodput: float
    good_share: float
    output_tokens_per_s: float
    cached_share: float
    arrivals_s: float
    growth_s: float
    mape: float
    coverage: float


def summarise(outcomes: Sequence[Outcome], slo: Slo) -> Summary:
    """Raises ValueError without outcomes."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.request.arrived_at)
    counted = ordered[int(WARM_UP_SHARE * len(ordered)) :]
    if not counted:
        raise ValueError("no requests")
    done = [outcome for outcome in counted if outcome.status == "finished"]
    began_at, last_at = counted[0].request.arrived_at, counted[-1].request.arrived_at
    seconds = _seconds([began_at, last_at])
    good = [o for o in done if o.ttft_s <= slo.ttft_s and o.tpot_s <= slo.tpot_s]
    in_time = [o for o in outcomes if o.status == "finished" and began_at <= o.finished_at <= last_at]
    ttfts, tpots = [o.ttft_s for o in done], [o.tpot_s for o in done if o.request.num_output_tokens > 1]
    errors, hits = _predictions(done)
    return Summary(
        num_requests=len(counted),
        num_finished=len(done),
        num_refused=sum(o.status == "refused" for o in counted),
        num_failed=sum(o.status == "failed" for o in counted),
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        second_mean_s=_mean([o.second_s for o in done if o.request.num_output_tokens > 1]),
        tpot_mean_s=_mean(tpots),
        tpot_p99_s=percentile(tpots, 0.99),
        waited_p99_s=percentile([o.waited_s for o in counted], 0.99),
        goodput=len(good) / seconds,
        good_share=len(good) / len(counted),
        output_tokens_per_s=sum(o.request.num_output_tokens for o in in_time) / seconds,
        cached_share=_ratio(sum(o.num_cached for o in done), sum(o.request.num_prompt_tokens for o in done)),
        arrivals_s=seconds,
        growth_s=_growth_s(ttfts),
        mape=_mean(errors),
        coverage=_mean(hits),
    )


class Misses:
    """Counts the requests of a run that miss a limit, while it runs."""

    def __init__(self, requests: Sequence[SimRequest], slo: Slo):
        arrivals = sorted(request.arrived_at for request in requests)
        num_warm = int(WARM_UP_SHARE * len(arrivals))
        count = len(arrivals) - num_warm
        self._slo, self._since, self._lasts_s = slo, arrivals[num_warm], _seconds(arrivals[num_warm:])
        self._count = count
        self._ttfts: list[tuple[float, float]] = []  # with the arrivals
        # A percentile is above its limit if all values from it on are
        if slo.share is None:
            self._limit = count - int((count - 1) * 0.99) - 1
        else:
            self._limit = count - math.ceil(slo.share * count - 1e-9)
        self._late = self._slow = self._bad = 0

    def are_too_many_late(self, request: SimRequest, ttft_s: float) -> bool:
        """The request's first token has come. Returns whether the run fails with it, whatever comes after:
        then `keeps` says no."""
        if request.arrived_at < self._since:
            return False
        is_late = ttft_s > self._slo.ttft_s
        self._late, self._bad = self._late + is_late, self._bad + is_late
        self._ttfts.append((request.arrived_at, ttft_s))
        return self._are_too_many() or (len(self._ttfts) == self._count and self._waits_grow())

    def _waits_grow(self) -> bool:
        growth_s = _growth_s([ttft_s for _, ttft_s in sorted(self._ttfts)])
        return _is_overload(growth_s, self._lasts_s, self._count)

    def are_too_many(self, outcome: Outcome) -> bool:
        """The same at the end of a request, whose first token was noted if there was one."""
        if outcome.request.arrived_at < self._since:
            return False
        is_slow = outcome.tpot_s > self._slo.tpot_s
        self._slow += is_slow
        self._bad += is_slow and outcome.ttft_s <= self._slo.ttft_s
        return outcome.status != "finished" or self._are_too_many()

    def _are_too_many(self) -> bool:
        worst = max(self._late, self._slow) if self._slo.share is None else self._bad
        return worst > self._limit


def keeps(summary: Summary | None, slo: Slo) -> bool:
    """None: the run was given up (`Misses`). Whether enough requests are within the limits, every request
    finished, and the queue does not grow: a run is short against a loose limit, and a queue that grows all
    the time would be within it until the end."""
    if summary is None:
        return False
    grows = _is_overload(summary.growth_s, summary.arrivals_s, summary.num_requests)
    is_complete = summary.num_finished == summary.num_requests and not grows
    if slo.share is not None:
        return is_complete and summary.good_share >= slo.share
    return is_complete and summary.ttft_p99_s <= slo.ttft_s and summary.tpot_p99_s <= slo.tpot_s


def _is_overload(growth_s: float, arrivals_s: float, num_requests: int) -> bool:
    """With a part e more load than the cluster can serve, waits grow by e * arrivals_s. But the number of
    Poisson arrivals varies by sqrt(n), so by chance n of them are 1 / sqrt(n) more load than their rate says.
    Growth below that is no evidence of overload; above it, more requests make the evidence stronger."""
    return growth_s > arrivals_s / math.sqrt(num_requests)


def _seconds(arrivals: Sequence[float]) -> float:
    """arrivals: ascending."""
    return max(arrivals[-1] - arrivals[0], 1e-9)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval; zero for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, STUDENT.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))


def fields(summary: Summary) -> dict[str, float]:
    """The fields of a record; rounded to what means something."""
    return {name: float(f"{value:.5g}") for name, value in asdict(summary).items()}


def _predictions(done: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """Errors as ratios to what came, and hits (1) or misses (0) of the interval. Requests with several
    attempts do not count."""
    errors, hits = [], []
    for outcome in done:
        prediction, actual_s = outcome.prediction, outcome.decided_ttft_s
        if prediction is None or prediction.ttft_s <= 0 or outcome.num_attempts > 1:
            continue
        errors.append(abs(prediction.ttft_s - actual_s) / actual_s)
        hits.append(float(prediction.low_s <= actual_s <= prediction.high_s))
    return errors, hits


def _growth_s(ttfts: Sequence[float]) -> float:
    third = len(ttfts) // 3
    return 3 * (_mean(ttfts[-third:]) - _mean(ttfts[-2 * third : -third])) if third else 0.0


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear between neighbours; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * fraction
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
