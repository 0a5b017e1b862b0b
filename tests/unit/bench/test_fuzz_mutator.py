"""Cases can be sent again by their number, and are what their kind says."""

from __future__ import annotations

import json

from bench.fuzz.corpus import seeds
from bench.fuzz.mutator import KINDS, Mutator


def test_equal_seeds_give_equal_cases_in_any_order():
    forward = [Mutator(seeds("m"), 1).case(number) for number in range(300)]
    mutator = Mutator(seeds("m"), 1)
    assert [mutator.case(number) for number in reversed(range(300))] == forward[::-1]
    assert {case.kind for case in forward} == set(KINDS)
    assert len({case.body for case in forward}) > 250


def test_valid_cases_are_of_the_corpus_and_others_are_not():
    mutator, known = Mutator(seeds("m"), 2), [seed.body for seed in seeds("m")]
    assert all(json.loads(mutator.case(number, ("valid",)).body) in known for number in range(50))
    changed = [mutator.case(number, ("tree", "media")).body for number in range(50)]
    assert sum(json.loads(body) not in known for body in changed) > 40
