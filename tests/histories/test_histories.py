"""Histories: the whole cluster in virtual time, with all that can go wrong. `tests/histories/history.py`
says what one is; `make histories` runs 100,000."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.slow_params import often
from tests.histories import steps
from tests.histories.history import History, play
from tests.histories.hunt import MUTANTS, NAMED, planted, seeds_to_find

FEW, *MANY = range(40), *(range(first, first + 100) for first in range(0, 500, 100))  # seeds; MANY are slow
SEED = 12
STRIDE = 9  # every how many steps a process is killed here; `make histories` kills it at all of them
CHEAP_MUTANTS = ("first_token_twice", "cancel_lost", "admission_kept", "partial_block_shared")


@pytest.mark.parametrize("seeds", often([FEW, *MANY], [FEW]), ids=str)
def test_nothing_is_wrong_lost_doubled_or_left(seeds: range) -> None:
    counts = sum(map(play, seeds), Counter())
    for kind in (
        "right",
        "cancelled",
        "kills",
        "cuts",
        "stops",
        "partitions",
        "transport faults",
        "door kills",
    ):
        assert counts[kind] > 0, kind


@pytest.mark.parametrize("victim", steps.VICTIMS)
def test_a_process_may_die_at_any_step(victim: str) -> None:
    first = 1 + list(steps.VICTIMS).index(victim)
    assert steps.crash_everywhere(victim, first=first, stride=STRIDE) > 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", steps.VICTIMS)
def test_a_process_may_die_at_every_step(victim: str) -> None:
    assert steps.crash_everywhere(victim) > 90


@pytest.mark.parametrize("name", CHEAP_MUTANTS)
def test_a_planted_bug_is_found_at_once(name: str) -> None:
    assert seeds_to_find(name, max_seeds=30) is not None


def test_a_planted_bug_is_found_by_a_crash() -> None:
    """An encoder dies when the prompt of its item, at another worker that encodes, has what it needs."""
    with planted("moved_item_not_called_off"), pytest.raises(AssertionError, match="its door does not want"):
        steps.crash_everywhere("W1", first=35)


@pytest.mark.parametrize("test", NAMED.values())
def test_a_bug_that_histories_do_not_find_has_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in Path(path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in NAMED])
def test_every_planted_bug_is_found(name: str) -> None:
    assert seeds_to_find(name) is not None


def test_a_seed_is_one_history() -> None:
    """Also in another process, whatever the hashes of strings are there."""
    traces = []
    for _ in range(2):
        history = History(SEED)
        history.run()
        traces.append("\n".join(history.trace_lines()))
    assert traces[0] == traces[1] and len(traces[0]) > 5000
    elsewhere = subprocess.run(
        [sys.executable, "-m", "tests.histories", "run", str(SEED), "--trace"],
        env={**os.environ, "PYTHONHASHSEED": "17"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.startswith(traces[0])
