"""Clocks of tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from cluster.clock import SystemClock


class ManualClock:
    """Time passes when a test says so."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at


class Leaps:
    """The time of all clocks of this process: the machine's, and what a test has leapt over. What only time
    ends, as a failed lease, then ends without a wait."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self._leapt_s

    def leap(self, seconds: float) -> None:
        self._leapt_s += seconds


@contextmanager
def leaping_clocks() -> Iterator[Leaps]:
    leaps = Leaps()
    with patch.object(SystemClock, "now", lambda _: leaps.now()):
        yield leaps
