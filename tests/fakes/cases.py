"""Parts of a list of cases, for tests that ask all of them in several ways: each way a part, all ways together every case."""

from __future__ import annotations

from collections.abc import Sequence

from bench.workload import KINDS, Answer, Case

Pair = tuple[Case, Answer]
NUM_PARTS = 3


def part_of(pairs: Sequence[Pair], part: int) -> list[Pair]:
    """A third, with as many of every kind; `make_cases` makes the kinds in turn."""
    return [pair for idx, pair in enumerate(pairs) if idx // len(KINDS) % NUM_PARTS == part % NUM_PARTS]
