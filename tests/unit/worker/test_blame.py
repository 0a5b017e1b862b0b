"""What an exception in a block ends: the request that the block acts for, or the engine."""

from __future__ import annotations

import asyncio

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


def test_wrong_books_end_the_engine():
    blame = Blame(lambda name, error: pytest.fail("no request is to blame"))
    with pytest.raises(BookkeepingError, match="a block is lost"), blame.of("r"):
        raise BookkeepingError("a block is lost")


def test_a_cancelled_task_is_no_failure_of_its_block():
    taken: list[Exception] = []
    with pytest.raises(asyncio.CancelledError), Isolated(taken.append):
        raise asyncio.CancelledError
    assert taken == []
