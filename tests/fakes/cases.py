"""Cases with the undivided model's answers, and parts of them for tests that ask in several ways: each way a
part, all ways together every case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.workload import KINDS, Answer, Case, Reference, make_cases

Pair = tuple[Case, Answer]
NUM_PARTS = 3


class Answered:
    """The first cases of a seed with their answers. An answer costs a run of `generate`: it is made when it
    is first asked for."""

    def __init__(self, model: Path, seed: int, max_tokens: int):
        self._model, self._seed, self._max_tokens = model, seed, max_tokens
        self._reference: Reference | None = None
        self._pairs: list[Pair] = []

    def first(self, num_cases: int) -> list[Pair]:
        self._reference = self._reference or Reference(self._model)
        for case in make_cases(self._seed, num_cases)[len(self._pairs) :]:
            self._pairs.append((case, self._reference.answer(case, self._max_tokens)))
        return self._pairs[:num_cases]


def part_of(pairs: Sequence[Pair], part: int) -> list[Pair]:
    """A third, with as many of every kind; `make_cases` makes the kinds in turn."""
    return [pair for idx, pair in enumerate(pairs) if idx // len(KINDS) % NUM_PARTS == part % NUM_PARTS]
