"""What an exception in a block ends: the request that the block acts for, or the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.errors import BookkeepingError, ClusterError, InternalError, RequestError
from cluster.isolation import Isolated
from cluster.worker.blame import UNEXPECTED, Blame


def test_an_exception_fails_its_request_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture):
    failed: list[tuple[str, ClusterError]] = []
    blame = Blame(lambda name, error: failed.append((name, error)))
    refused = RequestError("too long")
    for name, error in (("bug", ValueError("a bug")), ("refused", refused), ("fine", None)):
        with blame.of(name):
            if error is not None:
                raise error
    (bug, unexpected), (name, told) = failed
    assert bug == "bug" and isinstance(unexpected, InternalError) and unexpected.message == UNEXPECTED
    assert name == "refused" and told is refused
    (record,) = caplog.records
    assert record.message == "request bug failed" and record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError), "the log has the traceback"


@pytest.mark.parametrize(
    ("error", "num_lines"), [(RequestError("no token is left"), 0), (ValueError("a bug"), 2)]
)
def test_one_of_a_step_fails_alone_and_the_log_tells_bugs_only(error, num_lines, caplog):
    failed: list[str] = []

    def run(parts: Sequence[str]) -> list[str]:
        if "bad" in parts:
            raise error
        return [part.upper() for part in parts]

    blame = Blame(lambda name, _: failed.append(name))
    done = blame.together(["a", "bad", "b"], run, str, lambda: pytest.fail("the device is not in doubt"))
    assert done == [("a", "A"), ("b", "B")] and failed == ["bad"]
    assert len(caplog.records) == num_lines


def test_wrong_books_end_the_engine():
    blame = Blame(lambda name, error: pytest.fail("no request is to blame"))
    with pytest.raises(BookkeepingError, match="a block is lost"), blame.of("r"):
        raise BookkeepingError("a block is lost")


def test_a_cancelled_task_is_no_failure_of_its_block():
    taken: list[Exception] = []
    with pytest.raises(asyncio.CancelledError), Isolated(taken.append):
        raise asyncio.CancelledError
    assert taken == []
