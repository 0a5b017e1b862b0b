"""What predictions are corrected by, and how much they are to be trusted: both learnt from what happened.

A factor per (role, hardware), and one per kind of prediction for the whole time to first token: the exponential moving average of
log(actual / uncorrected), robust because an observation moves it by a bounded step (Huber), and bounded itself.

The interval is that of adaptive conformal inference (Gibbs and Candès, "Adaptive Conformal Inference Under Distribution
Shift", NeurIPS 2021): quantiles of log(actual / predicted) over a window, at a level that rises after every hit and falls after
every miss, so that in the long run the wanted share is covered however the cluster's behaviour changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.types.members import Role

FORGETTING = 0.05  # weight of a new observation
MAX_SURPRISE = 0.5  # of a logarithm, in one observation
MAX_FACTOR = 4.0  # and its inverse
WINDOW = 256  # observations
TARGET_COVERAGE = 0.9
LEVEL_STEP = 0.01  # Gibbs and Candès' gamma
ROUND_TRIP_S = 0.001  # before the first observation
ROUND_TRIP_FORGETTING = 0.01  # upwards; downwards at once
MAX_OVERHEAD_S = 0.1  # what is longer is a hiccup
MIN_OBSERVED = 20  # before that the interval is [predicted / MAX_FACTOR, predicted * MAX_FACTOR]


class Kind(StrEnum):
    """Of a prediction, by what bounds the time to first token."""

    TEXT = "text"  # without media
    COMPUTED = "computed"  # with media, which is there before its turn
    AWAITED = "awaited"  # prefill waits for embeddings
    STAY = "stay"  # computed in decode


@dataclass(frozen=True, slots=True)
class CalibrationStatistics:
    """Over the last `WINDOW` observations. NaN before the first."""

    num_observed: int
    mape: float  # mean absolute percentage error of ttft_s, as a ratio to the actual
    coverage: float  # share of actual TTFTs inside their interval
    factors: Mapping[tuple[Role, str], float]  # by role and hardware
    residuals: Mapping[Kind, float]  # on top of them


class Factor:
    """Multiplies predictions of one kind."""

    def __init__(self) -> None:
        self._log = 0.0
        self.value = 1.0

    def observe(self, actual: float, uncorrected: float) -> None:
        """Observations without a duration say nothing."""
        if actual <= 0 or uncorrected <= 0:
            return
        surprise = math.log(actual / uncorrected) - self._log
        self._log += FORGETTING * max(-MAX_SURPRISE, min(MAX_SURPRISE, surprise))
        self._log = max(-math.log(MAX_FACTOR), min(math.log(MAX_FACTOR), self._log))
        self.value = math.exp(self._log)


class ConformalInterval:
    """Of the logarithm of actual / predicted."""

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._miss_rate = 1 - TARGET_COVERAGE

    def bounds(self) -> tuple[float, float]:
        """Ratios to what is predicted."""
        num_seen = len(self._sorted)
        if num_seen < MIN_OBSERVED:
            return 1 / MAX_FACTOR, MAX_FACTOR
        tail = max(0.0, min(0.5, self._miss_rate / 2))
        num_out = math.floor(tail * (num_seen + 1))  # below it, and as many above
        low = self._sorted[max(0, num_out - 1)]
        high = self._sorted[min(num_seen - 1, num_seen - num_out)]
        return math.exp(low), math.exp(high)

    def observe(self, ratio: float, is_inside: bool) -> None:
        """`is_inside`: of the interval that was told when the prediction was made."""
        miss = 0.0 if is_inside else 1.0
        self._miss_rate += LEVEL_STEP * (1 - TARGET_COVERAGE - miss)
        self._miss_rate = max(0.0, min(1.0, self._miss_rate))
        score = math.log(ratio)
        self._window.append(score)
        insort(self._sorted, score)
        if len(self._window) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]


class Accuracy:
    """How good the last predictions were."""

    def __init__(self) -> None:
        self._window: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        self.num_observed = 0

    def observe(self, actual: float, predicted: float, is_inside: bool) -> None:
        self._window.append((abs(predicted - actual) / actual, is_inside))
        self.num_observed += 1

    @property
    def mape(self) -> float:
        return self._mean([error for error, _ in self._window])

    @property
    def coverage(self) -> float:
        return self._mean([float(is_inside) for _, is_inside in self._window])

    @staticmethod
    def _mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan


class Calibration:
    """All that a door has learnt about its predictions.

    overhead_s      of a time to first token that no worker accounts for: the ways there and back, and the door itself
    round_trip_s    the shortest of them lately: the ways alone
    """

    def __init__(self) -> None:
        self.overhead_s = 0.0
        self.round_trip_s = ROUND_TRIP_S
        self._factors: dict[tuple[Role, str], Factor] = {}
        self._residuals: dict[Kind, Factor] = {}
        self._intervals: dict[Kind, ConformalInterval] = {}
        self._accuracy = Accuracy()

    def factor(self, role: Role, hardware: str) -> float:
        factor = self._factors.get((role, hardware))
        return 1.0 if factor is None else factor.value

    def residual(self, kind: Kind) -> float:
        factor = self._residuals.get(kind)
        return 1.0 if factor is None else factor.value

    def interval(self, kind: Kind, ttft_s: float) -> tuple[float, float]:
        interval = self._intervals.setdefault(kind, ConformalInterval())
        low, high = interval.bounds()
        return low * ttft_s, high * ttft_s

    def observe_phase(self, role: Role, hardware: str, actual_s: float, uncorrected_s: float) -> None:
        self._factors.setdefault((role, hardware), Factor()).observe(actual_s, uncorrected_s)

    def observe_overhead(self, overhead_s: float) -> None:
        overhead_s = max(0.0, min(overhead_s, MAX_OVERHEAD_S))
        self.overhead_s += FORGETTING * (overhead_s - self.overhead_s)
        forgotten = 1.0 if overhead_s < self.round_trip_s else ROUND_TRIP_FORGETTING
        self.round_trip_s += forgotten * (overhead_s - self.round_trip_s)

    def observe_ttft(
        self,
        kind: Kind,
        actual_s: float,
        predicted_s: float,
        correction: float,
        bounds: tuple[float, float],
    ) -> None:
        """`correction`: the residual that `predicted_s` contains; `bounds`: its interval. Without a duration it says nothing."""
        if actual_s <= 0 or predicted_s <= 0:
            return
        is_inside = bounds[0] <= actual_s <= bounds[1]
        self._accuracy.observe(actual_s, predicted_s, is_inside)
        self._residuals.setdefault(kind, Factor()).observe(actual_s, predicted_s / correction)
        interval = self._intervals.setdefault(kind, ConformalInterval())
        interval.observe(actual_s / predicted_s, is_inside)

    def statistics(self) -> CalibrationStatistics:
        return CalibrationStatistics(
            self._accuracy.num_observed,
            self._accuracy.mape,
            self._accuracy.coverage,
            {key: factor.value for key, factor in self._factors.items()},
            {key: factor.value for key, factor in self._residuals.items()},
        )
