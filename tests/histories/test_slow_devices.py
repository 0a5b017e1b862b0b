"""Histories of workers whose devices sum the bytes of leases over several polls, as GPUs do."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest

from tests.fakes.slow_memory import SlowMemory
from tests.histories import workers
from tests.histories.history import play

NUM_HISTORIES = 30


def test_checks_that_end_late_lose_nothing_and_free_no_block_early(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Random("devices")
    slow = partial(SlowMemory, num_looks=lambda: looks.choice([0, 0, 1, 2]))
    monkeypatch.setattr(workers, "BlockMemory", slow)
    counts = sum((play(seed) for seed in range(NUM_HISTORIES)), Counter())
    for kind in ("right", "kills", "transport faults", "partitions"):
        assert counts[kind] > 0, kind
