"""Whether a series of measurements is flat: the test that gives the verdicts of `bench.soak`.

The slope is Theil and Sen's: the median of the slopes of all pairs of points, which outliers hardly move.
Its interval is Sen's, from the variance of Kendall's statistic. A series rises if even the lower end of the
interval, over all the time measured, is more than what is tolerated: neither noise nor a trend too small to
matter counts.
Points that are neighbours resemble each other more than the interval assumes; the tolerance makes up for it.

The first part of a run is left out: caches and allocators fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.4  # of the time
Z = 2.576  # 99 % of a normal distribution
MAX_POINTS = 200  # more are put together, by their median
MIN_POINTS = 8


@dataclass(frozen=True)
class Trend:
    """The trend of one series, without its warm-up."""

    median: float
    slope: float  # per unit of time
    low: float  # the interval of the slope
    high: float
    span: float  # of time

    @property
    def rise(self) -> float:
        return self.slope * self.span

    def rises(self, tolerated: float) -> bool:
        return self.low * self.span > tolerated


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Raises ValueError if there are too few points."""
    x, y = np.asarray(times, float), np.asarray(values, float)
    kept = x >= x[0] + WARM_UP * (x[-1] - x[0]) if len(x) else np.zeros(0, bool)
    x, y = x[kept], y[kept]
    if len(x) < MIN_POINTS:
        raise ValueError(f"{len(x)} points behind the warm-up are too few; {MIN_POINTS} are needed")
    if len(x) > MAX_POINTS:
        parts = np.array_split(np.arange(len(x)), MAX_POINTS)
        x, y = (np.array([np.median(series[part]) for part in parts]) for series in (x, y))
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    half = Z * np.sqrt(len(x) * (len(x) - 1) * (2 * len(x) + 5) / 18)
    low = slopes[max(0, int((len(slopes) - half) / 2))]
    high = slopes[min(len(slopes) - 1, int(np.ceil((len(slopes) + half) / 2)))]
    return Trend(float(np.median(y)), float(np.median(slopes)), float(low), float(high), float(x[-1] - x[0]))
