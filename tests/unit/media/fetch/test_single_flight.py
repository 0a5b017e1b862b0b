"""Equal work once: who starts, joins, leaves, fails."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import UnavailableError
from cluster.media.fetch.single_flight import SingleFlight


class Work:
    """Runs until it is told its result; counts how often it was started and cancelled."""

    def __init__(self) -> None:
        self.num_started = self.num_cancelled = 0
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.num_started += 1
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_joined_work_is_done_once_and_then_anew():
    flight, work = SingleFlight(), Work()
    callers = [asyncio.create_task(flight.join("a", work)) for _ in range(10)]
    await turns()
    work.result.set_result("done")
    assert await asyncio.gather(*callers) == ["done"] * 10
    assert work.num_started == 1
    assert await flight.join("a", work) == "done"
    assert work.num_started == 2


async def test_other_keys_are_other_work():
    flight, work = SingleFlight(), Work()
    callers = [asyncio.create_task(flight.join(key, work)) for key in "aabb"]
    await turns()
    work.result.set_result("done")
    await asyncio.gather(*callers)
    assert work.num_started == 2


async def test_an_error_reaches_all_and_is_not_remembered():
    flight, work = SingleFlight(), Work()
    callers = [asyncio.create_task(flight.join("a", work)) for _ in range(3)]
    await turns()
    work.result.set_exception(ValueError("no"))
    assert [str(error) for error in await asyncio.gather(*callers, return_exceptions=True)] == ["no"] * 3
    assert await flight.join("a", work_that("fine")) == "fine"


def work_that(result: str):
    async def work() -> str:
        return result

    return work


async def test_the_last_to_leave_cancels_and_the_next_starts_anew():
    flight, work = SingleFlight(), Work()
    callers = [asyncio.create_task(flight.join("a", work)) for _ in range(2)]
    await turns()
    callers[0].cancel()
    await turns()
    assert work.num_cancelled == 0
    callers[1].cancel()
    late = asyncio.create_task(flight.join("a", work_that("fine")))
    await turns()
    assert work.num_cancelled == 1
    assert await late == "fine"
    assert all(caller.cancelled() for caller in callers)


async def test_closing_ends_all_work_and_tells_the_callers():
    flight, work = SingleFlight(), Work()
    caller = asyncio.create_task(flight.join("a", work))
    await turns()
    await flight.aclose()
    assert work.num_cancelled == 1
    for refused in (caller, flight.join("b", work)):
        with pytest.raises(UnavailableError):
            await refused
    await flight.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
