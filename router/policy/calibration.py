"""Corrections of predictions, and intervals around them, both learnt from actual durations.

There is a factor per (role, hardware), and one per kind of prediction for the whole time to first token. A
factor is the median of actual / uncorrected over a window. It is not the mean, because later requests that
overtake can only lengthen a wait, and a few unforeseeable bursts would raise the mean for all requests.

The interval is that of adaptive conformal inference (Gibbs and Candès, "Adaptive Conformal Inference Under
Distribution Shift", NeurIPS 2021): quantiles of log(actual / predicted) over a window. Their level rises
after every hit and falls after every miss. So the wanted share is covered in the long run, however the
cluster's behaviour changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from cluster.types.members import Role

MAX_FACTOR = 4.0  # and its inverse
FACTOR_WINDOW = 64  # observations that a factor is the median of
NUM_ASSUMED = 8  # observations without an error, assumed at the start
INTERVAL_WINDOW = 128  # observations behind an interval
ACCURACY_WINDOW = 256  # observations behind the reported error and coverage
TARGET_COVERAGE = 0.9
LEVEL_STEP = 0.03  # Gibbs and Candès' gamma: a larger step follows changes sooner and varies more
ROUND_TRIP_S = 0.001  # before the first observation
ROUND_TRIP_FORGETTING = 0.01  # weight of a longer observation; a shorter one counts at once
MAX_OVERHEAD_S = 0.1  # longer overheads are outliers
MIN_OBSERVED = 20  # before that the interval is [predicted / MAX_FACTOR, predicted * MAX_FACTOR]


class Kind(StrEnum):
    """A prediction's kind, by what bounds the time to first token, and by where the prompt is computed."""

    TEXT = "text"  # without media
    COMPUTED = "computed"  # with media whose embeddings arrive before its turn
    AWAITED = "awaited"  # prefill waits for embeddings
    BESIDE_ANSWERS = "beside_answers"  # not awaited, at a worker that decodes


class Window:
    """The last observations, in order of size."""

    def __init__(self, size: int, assumed: Sequence[float] = ()):
        self._size = size
        self._in_time = deque(assumed)
        self.ordered = sorted(assumed)

    def observe(self, value: float) -> None:
        self._in_time.append(value)
        insort(self.ordered, value)
        if len(self.ordered) > self._size:
            del self.ordered[bisect_left(self.ordered, self._in_time.popleft())]

    @property
    def median(self) -> float:
        middle = len(self.ordered) // 2
        return (self.ordered[middle] + self.ordered[~middle]) / 2


class Factor:
    """Multiplies the predictions of one kind."""

    def __init__(self) -> None:
        self._ratios = Window(FACTOR_WINDOW, [1.0] * NUM_ASSUMED)
        self.value = 1.0

    def observe(self, actual: float, uncorrected: float) -> None:
        """Observations without a duration are ignored."""
        if actual > 0 and uncorrected > 0:
            self._ratios.observe(max(1 / MAX_FACTOR, min(MAX_FACTOR, actual / uncorrected)))
            self.value = self._ratios.median


class ConformalInterval:
    """An interval of the logarithm of actual / predicted."""

    def __init__(self) -> None:
        self._scores = Window(INTERVAL_WINDOW)
        self._miss_rate = 1 - TARGET_COVERAGE

    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound, as ratios to the predicted value."""
        scores = self._scores.ordered
        if len(scores) < MIN_OBSERVED:
            return 1 / MAX_FACTOR, MAX_FACTOR
        tail = max(0.0, min(0.5, self._miss_rate / 2))
        num_out = math.floor(tail * (len(scores) + 1))  # scores below the interval, and as many above it
        low = scores[max(0, num_out - 1)]
        high = scores[min(len(scores) - 1, len(scores) - num_out)]
        return math.exp(low), math.exp(high)

    def observe(self, ratio: float, is_inside: bool) -> None:
        """`is_inside`: whether the actual value was in the interval given with the prediction."""
        miss = 0.0 if is_inside else 1.0
        self._miss_rate += LEVEL_STEP * (1 - TARGET_COVERAGE - miss)
        self._miss_rate = max(0.0, min(1.0, self._miss_rate))
        self._scores.observe(math.log(ratio))


class Accuracy:
    """Error and coverage of the last `ACCURACY_WINDOW` predictions. NaN before the first."""

    def __init__(self) -> None:
        self._window: deque[tuple[float, bool]] = deque(maxlen=ACCURACY_WINDOW)
        self.num_observed = 0

    def observe(self, actual: float, predicted: float, is_inside: bool) -> None:
        self._window.append((abs(predicted - actual) / actual, is_inside))
        self.num_observed += 1

    @property
    def mape(self) -> float:
        """Mean absolute percentage error of times to first token, as a ratio to the actual ones."""
        return self._mean([error for error, _ in self._window])

    @property
    def coverage(self) -> float:
        """Share of the actual times inside their interval."""
        return self._mean([float(is_inside) for _, is_inside in self._window])

    @staticmethod
    def _mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan


class Calibration:
    """All that a door has learnt about its predictions.

    overhead_s      the part of a time to first token that no worker accounts for: messages to the worker and
                    back, and the door itself; the median
    round_trip_s    the shortest recent overhead: the messages alone
    """

    def __init__(self) -> None:
        self._overheads = Window(FACTOR_WINDOW, [0.0])
        self.overhead_s = 0.0
        self.round_trip_s = ROUND_TRIP_S
        self._factors: dict[tuple[Role, str], Factor] = {}
        self._residuals: dict[Kind, Factor] = {}
        self._intervals: dict[Kind, ConformalInterval] = {}
        self.accuracy = Accuracy()

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
        self._overheads.observe(overhead_s)
        self.overhead_s = self._overheads.median
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
        """`correction`: the residual that `predicted_s` contains; `bounds`: its interval. Observations
        without a duration are ignored."""
        if actual_s <= 0 or predicted_s <= 0:
            return
        is_inside = bounds[0] <= actual_s <= bounds[1]
        self.accuracy.observe(actual_s, predicted_s, is_inside)
        self._residuals.setdefault(kind, Factor()).observe(actual_s, predicted_s / correction)
        interval = self._intervals.setdefault(kind, ConformalInterval())
        interval.observe(actual_s / predicted_s, is_inside)

    @property
    def factors(self) -> dict[tuple[Role, str], float]:
        """Returns the factors by role and hardware."""
        return {key: factor.value for key, factor in self._factors.items()}
