"""Admission control: every waiting request is admitted or refused in the end, and an error in the queue costs
no other request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from cluster.errors import InternalError, OverloadedError
from router.admission.controller import REPORT_EVERY_S, RETRY_S, AdmissionController
from router.admission.queue import AdmissionQueue, AdmissionTicket, Capacity, Reported

MAX_WAIT_S = 5.0


def ticket(name: str) -> AdmissionTicket:
    return AdmissionTicket(name, "", "all", True, 10.0, 1, 10.0, 0.0)


@pytest.fixture
def queue() -> AdmissionQueue:
    classes = (AdmissionClassArgs(name="all", max_wait_s=MAX_WAIT_S),)
    return AdmissionQueue(AdmissionArgs(classes=classes, max_outstanding_s=1.0), 0.3, Capacity(1, 1, 100))


@pytest.fixture
def control(queue) -> Iterator[AdmissionController]:
    """With two requests that were admitted: the next one waits."""
    control = AdmissionController(queue)
    assert control.offer(ticket("first"), 0.0) and control.offer(ticket("second"), 0.0)
    yield control
    for name in ("first", "second", "next"):
        control.leave(name)
    assert control.settle(100.0) == [] and control.is_idle and control.deadline is None


def test_a_waiting_request_goes_when_another_is_done(control):
    assert not control.offer(ticket("next"), 0.0)
    assert control.settle(0.0) == [] and control.num_waiting == 1
    control.done("first")
    assert control.settle(1.0) == [("next", None)]
    assert control.num_waiting == 0


def test_a_request_that_waits_too_long_is_refused_with_a_time_to_come_back(control):
    control.offer(ticket("next"), 0.0)
    control.settle(0.0)
    assert control.deadline == MAX_WAIT_S
    ((name, error),) = control.settle(MAX_WAIT_S)
    assert name == "next" and isinstance(error, OverloadedError) and error.retry_after_s >= 1


def test_a_waiting_request_that_leaves_is_forgotten(control):
    control.offer(ticket("next"), 0.0)
    control.leave("next")
    control.done("first")
    assert control.settle(1.0) == [] and control.num_waiting == 0


def test_a_request_that_would_wait_too_long_is_refused_at_once(control):
    control.offer(replace(ticket("large"), work_s=100.0), 0.0)
    with pytest.raises(OverloadedError, match="busy"):
        control.offer(ticket("next"), 0.0)
    control.leave("large")


def test_a_report_of_free_workers_admits_the_next(control):
    control.offer(ticket("next"), 0.0)
    control.settle(0.0)
    control.report(Capacity(1, 4, 100), Reported())
    assert control.settle(0.5) == [("next", None)]


def test_loads_are_taken_while_requests_wait_and_at_most_every_so_often(control):
    control.load_changed()
    assert not control.takes_load(0.0) and control.deadline is None, "no request waits"
    control.offer(ticket("next"), 0.0)
    assert control.takes_load(0.0) and not control.takes_load(0.0)
    control.settle(0.0)
    for _ in range(2):
        control.load_changed()
        assert not control.takes_load(0.5 * REPORT_EVERY_S) and control.deadline == REPORT_EVERY_S
    assert control.takes_load(REPORT_EVERY_S) and control.deadline == MAX_WAIT_S
    control.load_changed()
    control.report(Capacity(1, 1, 100), Reported())
    assert not control.takes_load(1.0), "it is new no longer"


def test_an_error_in_the_queue_is_tried_again_and_loses_no_request(control, queue, monkeypatch):
    def fail(now: float) -> list[AdmissionTicket]:
        raise ZeroDivisionError

    control.offer(ticket("next"), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "freed", fail)
        assert control.settle(0.0) == [] and control.deadline == RETRY_S
    control.done("first")
    assert control.settle(RETRY_S) == [("next", None)]


def test_a_request_that_the_queue_has_lost_fails(control, queue, monkeypatch):
    def lose(now: float) -> list[AdmissionTicket]:
        queue.leave("next")
        raise ZeroDivisionError

    control.offer(ticket("next"), 0.0)
    monkeypatch.setattr(queue, "freed", lose)
    ((name, error),) = control.settle(0.0)
    assert name == "next" and isinstance(error, InternalError)
