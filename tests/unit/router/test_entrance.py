"""Admission, awaited: nobody waits who need not, everybody is told, nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from cluster.clock import SystemClock
from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from cluster.errors import OverloadedError
from router.admission.entrance import Entrance
from router.admission.queue import AdmissionQueue, AdmissionTicket, Capacity, Reported

MAX_WAIT_S = 0.05


def ticket(name: str) -> AdmissionTicket:
    return AdmissionTicket(name, "", "all", True, 10.0, 1, 10.0, 0.0)


@pytest.fixture
async def entrance():
    args = AdmissionArgs(
        classes=(AdmissionClassArgs(name="all", max_wait_s=MAX_WAIT_S),), max_outstanding_s=1.0
    )
    queue = AdmissionQueue(args, 0.3, Capacity(1, 1, 100))
    entrance = Entrance(queue, SystemClock())
    yield entrance
    assert entrance.is_idle and entrance._timer is None


def fill(entrance: Entrance) -> list[str]:
    """Until somebody would have to wait; the names of those who are in."""
    names = ["first", "second"]
    for name in names:
        assert entrance.enter(ticket(name)) is None
    return names


def wait(entrance: Entrance, name: str = "next") -> asyncio.Future[None]:
    """Behind those who fill it."""
    future = entrance.enter(ticket(name))
    assert future is not None, "it was let in"
    return future


async def test_who_waits_goes_when_another_is_done(entrance, monkeypatch):
    monkeypatch.setattr(entrance._queue, "_wait_s", lambda _: 0.0)
    names = fill(entrance)
    waiting = wait(entrance)
    assert entrance.num_waiting == 1
    entrance.done(names[0])
    await asyncio.wait_for(waiting, 1)
    assert entrance.num_waiting == 0
    for name in (*names, "next"):
        entrance.leave(name)


async def test_who_waits_too_long_is_refused_with_a_time_to_come_back(entrance, monkeypatch):
    monkeypatch.setattr(entrance._queue, "_wait_s", lambda _: 0.0)
    names = fill(entrance)
    waiting = wait(entrance)
    with pytest.raises(OverloadedError) as refusal:
        await asyncio.wait_for(waiting, 2)
    assert refusal.value.retry_after_s >= 1
    for name in names:
        entrance.leave(name)


async def test_who_leaves_while_waiting_is_forgotten(entrance, monkeypatch):
    monkeypatch.setattr(entrance._queue, "_wait_s", lambda _: 0.0)
    names = fill(entrance)
    waiting = wait(entrance)
    entrance.leave("next")
    assert waiting.cancelled() and entrance.num_waiting == 0
    for name in names:
        entrance.leave(name)


async def test_who_would_wait_too_long_is_refused_at_once(entrance):
    names = fill(entrance)
    with pytest.raises(OverloadedError, match="busy"):
        for number in range(100):
            wait(entrance, f"w{number}")
            names.append(f"w{number}")
    for name in names:
        entrance.leave(name)


async def test_a_report_of_free_workers_lets_the_next_in(entrance, monkeypatch):
    monkeypatch.setattr(entrance._queue, "_wait_s", lambda _: 0.0)
    names = fill(entrance)
    waiting = wait(entrance)
    entrance.report(Capacity(1, 4, 100), Reported())
    await asyncio.wait_for(waiting, 1)
    assert entrance.num_waiting == 0
    for name in (*names, "next"):
        entrance.leave(name)
