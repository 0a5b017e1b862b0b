"""Works that are timed by turns, so that what slows the machine down for a while slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Work = Callable[[], object]
MIN_ROUNDS = 5


def in_turns(
    works: Sequence[Work],
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = MIN_ROUNDS,
) -> list[list[float]]:
    """Seconds of every call of each work, by `clock`. Every round runs all works once.

    There are at least so many rounds, and as many as begin within `seconds`, after one that is not timed."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds
    while len(times[0]) < rounds or time.perf_counter() < end:
        for work, taken in zip(works, times, strict=True):
            start = clock()
            work()
            taken.append(clock() - start)
    return times
