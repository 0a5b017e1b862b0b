"""Which of several ranks' errors ends a start."""

from __future__ import annotations

from cluster.errors import ConfigError
from cluster.model.collectives import OtherRankError
from cluster.worker.ranks import failure_of, first_failure


def test_the_first_error_that_does_not_follow_from_another_ends_the_start() -> None:
    errors = [
        OtherRankError("another"),
        ConfigError("no room", param="kv_blocks"),
        RuntimeError("reset by peer"),
    ]
    failures = [failure_of(rank, error) for rank, error in enumerate(errors)]
    for each in (failures, failures[::-1]):
        first = first_failure(each)
        assert (first.rank, first.message, first.param) == (1, "no room", "kv_blocks")
    assert failures[2].message == "RuntimeError: reset by peer"
    assert first_failure(failures[:1]) is failures[0]
