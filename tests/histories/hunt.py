"""How many seeds it takes until a planted bug (`tests.histories.mutants`) is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tests.histories import mutants, mutants_of_doors
from tests.histories.history import HistoryError, play
from tests.histories.mutants import Change

MAX_SEEDS = 600  # the rarest bug is found by about one seed in 200
MUTANTS: dict[str, Callable[[], Change]] = {
    each.__name__: each for each in (*mutants.ALL, *mutants_of_doors.ALL)
}

# Found by a test of its own: histories do not come to the state in which the bug shows
NAMED = {
    # The pool gives out last what was freed last: histories rarely need the block before the next step.
    "forward_ahead_holds_nothing": "tests/unit/engine/test_ahead.py::"
    "test_the_block_that_is_written_is_held_until_the_forward_has_ended",
    "state_ahead_not_held": "tests/unit/engine/test_ahead.py::"
    "test_the_state_that_is_written_is_held_until_the_forward_has_ended",
    # The lease of an encoder that has ended is closed without it, and the item is granted again, only later.
    "encoder_lost_ignored": "tests/unit/engine/test_features.py::"
    "test_an_item_whose_encoder_is_lost_moves_to_other_room_or_waits_for_its_own",
    "former_connection_heard": "tests/unit/worker/test_lost_grants.py::"
    "test_what_an_earlier_connection_still_holds_is_not_read",
    "former_encoder_heard": "tests/unit/router/test_language_flow.py::"
    "test_an_item_that_moves_to_the_worker_of_its_prompt_is_called_off_there",
}

# Bugs that show after one kind of fault only: histories with that kind alone
FOCUS = {
    "moved_item_not_called_off": "strikes",
    "unwanted_grant_kept": "cancels",
    "early_tokens_lost": "slow networks",
    "lost_worker_unnoticed": "kills",
    "needs_no_worker": "kills",
    "stale_tier": "slow disks",
    "write_called_off": "worker partitions",
    "late_write_ignored": "late writes",
    "late_embeddings_ignored": "late writes",
    "late_word_unnoticed": "late writes",
    "lease_time_from_open": "late grants",
    "no_margin": "late grants",
    "encoder_keeps_dropped_doors": "cuts",
    "lost_grants_kept": "cuts",
    "read_grants_lost": "cuts",
    "door_drop_frees_the_first": "cuts",
    "drained_worker_kept": "drains",
    "gone_without_a_word": "drains",
    "losses_add_up": "cuts",
    "suspect_held_for_ever": "strikes",
    "deadline_ignored": "long losses",
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    owner, attribute, function = MUTANTS[name]()
    with patch.object(owner, attribute, function):
        yield


def seeds_to_find(name: str, max_seeds: int = MAX_SEEDS) -> tuple[int, str] | None:
    """How many seeds it took, and what was seen. None: it was not found."""
    focus = FOCUS.get(name, "")
    for seed in range(max_seeds):
        with planted(name):
            seen = failure_of(seed, focus)
        if seen is not None and failure_of(seed, focus) is None:  # without the bug nothing is wrong
            return seed + 1, seen
    return None


def failure_of(seed: int, focus: str) -> str | None:
    try:
        play(seed, focus)
    except HistoryError as error:
        return str(error).partition("\n")[0].partition(": ")[2]
    return None
