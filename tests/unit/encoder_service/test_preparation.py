"""Preparing ahead of the device: in order, within bytes, and one long item does not stop the small ones."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import NotWantedError
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.types.media import MediaItem
from encoder_service.preparation import Preparation, PreparationLimits
from encoder_service.runner import Prepared
from tests.fakes.engines import ManualExecutor
from tests.fakes.requests import make_item

POLICY = SchedulingPolicy(aging_s=5.0, tokens_per_s=10.0, text_share=0.5)
LONG_ROWS = 100


def prepare(item: MediaItem, is_wanted=lambda: True) -> Prepared:
    if item.media_hash.startswith("bad"):
        raise ValueError("cannot be decoded")
    return Prepared({"rows": torch.zeros(item.geometry.num_tokens, dtype=torch.uint8)}, 1)


class Bench:
    def __init__(self, max_bytes: int = 1 << 30, num_threads: int = 2):
        self.executor = ManualExecutor()
        self.done: dict[str, Prepared | BaseException] = {}
        limits = PreparationLimits(num_threads, max_bytes, LONG_ROWS)
        self.preparation = Preparation(prepare, self.executor, limits, POLICY, self.done.__setitem__)

    def put(self, name: str, num_rows: int, arrived_at: float = 0.0, priority: int = 0) -> None:
        ticket = Ticket(name, arrived_at, num_rows, priority=priority)
        self.preparation.put(ticket, make_item(name, num_rows))

    def run_all(self) -> list[str]:
        """Names, in the order in which they were prepared."""
        while self.executor.jobs:
            self.executor.run_one()
        return list(self.done)


def test_the_most_urgent_is_prepared_first():
    bench = Bench(num_threads=1)
    bench.put("first", 10)
    for name, rows, arrived_at in (("large", 90, 1.0), ("small", 10, 1.0), ("late", 10, 20.0)):
        bench.put(name, rows, arrived_at)
    bench.put("urgent", 90, 1.0, priority=-5)
    assert bench.run_all() == ["first", "urgent", "small", "large", "late"]


def test_an_item_that_becomes_more_urgent_goes_sooner():
    bench = Bench(num_threads=1)
    for name in ("first", "second", "third"):
        bench.put(name, 10)
    bench.preparation.reorder(Ticket("third", 0.0, 10, priority=-1))
    bench.preparation.reorder(Ticket("first", 0.0, 10, priority=9))  # too late: a thread has it
    assert bench.run_all() == ["first", "third", "second"]


def test_a_thread_stops_preparing_an_unwanted_item_and_goes_on_if_it_is_wanted_again():
    seen: list[bool] = []
    executor = ManualExecutor()
    done: dict[str, Prepared | BaseException] = {}

    def prepare_slowly(item: MediaItem, is_wanted) -> Prepared:
        seen.append(is_wanted())
        assert not preparation.withdraw(item.media_hash)
        seen.append(is_wanted())
        if item.media_hash == "again":
            preparation.reorder(Ticket("again", 0.0, 1))
            seen.append(is_wanted())
        if not is_wanted():
            raise NotWantedError("not wanted any more")
        return prepare(item)

    limits = PreparationLimits(1, 1 << 30, LONG_ROWS)
    preparation = Preparation(prepare_slowly, executor, limits, POLICY, done.__setitem__)
    for name in ("gone", "again", "gone"):
        preparation.put(Ticket(name, 0.0, 1), make_item(name, 1))
        executor.run_one()
    assert seen == [True, False, True, False, True, True, False]
    assert isinstance(done["gone"], NotWantedError) and isinstance(done["again"], Prepared)
    preparation.release("again")
    assert preparation.held_bytes == 0


def test_long_items_leave_a_thread_to_the_others():
    bench = Bench()
    for i in range(3):
        bench.put(f"long {i}", LONG_ROWS + 1)
    assert len(bench.executor.jobs) == 1
    bench.put("small", LONG_ROWS, 100.0)
    assert len(bench.executor.jobs) == 2
    bench.executor.jobs.rotate(1)
    assert bench.run_all() == ["small", "long 0", "long 1", "long 2"]


def test_one_thread_alone_prepares_long_items_too():
    bench = Bench(num_threads=1)
    bench.put("long", LONG_ROWS + 1)
    assert bench.run_all() == ["long"]


def test_no_item_overtakes_one_that_waits_for_bytes():
    bench = Bench(max_bytes=100)
    bench.put("teacher", 50)
    bench.run_all()
    for name, rows in (("large", 60), ("small", 5)):
        bench.put(name, rows, priority=0 if name == "large" else 2)
    assert bench.run_all() == ["teacher"]
    bench.preparation.release("teacher")
    assert bench.run_all() == ["teacher", "large", "small"] and bench.preparation.held_bytes == 65


def test_an_item_larger_than_the_budget_is_prepared_when_nothing_is_held():
    bench = Bench(max_bytes=10)
    bench.put("huge", 90)
    bench.put("next", 90)
    assert bench.run_all() == ["huge"]
    bench.preparation.release("huge")
    assert bench.run_all() == ["huge", "next"]


def test_a_bad_item_holds_nothing_and_lets_the_next_begin():
    bench = Bench(num_threads=1)
    bench.put("bad", 10)
    bench.put("good", 10)
    assert bench.run_all() == ["bad", "good"]
    assert isinstance(bench.done["bad"], ValueError) and bench.preparation.held_bytes == 10


def test_only_an_item_that_still_waits_can_be_withdrawn():
    bench = Bench(num_threads=1)
    bench.put("begun", 10)
    bench.put("waiting", 10)
    assert not bench.preparation.withdraw("begun")
    assert bench.preparation.withdraw("waiting") and not bench.preparation.withdraw("waiting")
    assert bench.run_all() == ["begun"]


steps = st.lists(
    st.tuples(st.sampled_from(["put", "run", "release", "withdraw"]), st.integers(0, 30)), max_size=60
)


@given(steps, st.integers(1, 3))
def test_bytes_threads_and_every_item_are_accounted_for(steps, num_threads):
    rows, budget = 20, 100
    bench = Bench(budget, num_threads)
    bench.put("teacher", rows)
    bench.run_all()
    bench.preparation.release("teacher")
    put: set[str] = set()
    gone: set[str] = set()
    for what, number in steps:
        name = str(number)
        if what == "put" and name not in put:
            put.add(name)
            bench.put(name, rows, priority=number % 3)
        elif what == "run":
            bench.executor.run_one()
        elif what == "release" and name in bench.done and name not in gone:
            gone.add(name)
            bench.preparation.release(name)
        elif (
            what == "withdraw" and name in put and name not in bench.done and bench.preparation.withdraw(name)
        ):
            gone.add(name)
        assert bench.preparation.held_bytes <= budget and len(bench.executor.jobs) <= num_threads
    while put - gone:
        bench.run_all()
        ready = [name for name in put - gone if name in bench.done]
        assert ready, "no job goes on"
        gone.update(ready)
        for name in ready:
            bench.preparation.release(name)
    assert bench.preparation.held_bytes == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_real_threads_prepare_everything_once(num_threads):
    all_done = threading.Event()
    done: list[str] = []

    def on_done(name: str, _: Prepared | BaseException) -> None:
        done.append(name)
        preparation.release(name)
        if len(done) == 200:
            all_done.set()

    with ThreadPoolExecutor(num_threads) as executor:
        limits = PreparationLimits(num_threads, 1 << 20, LONG_ROWS)
        preparation = Preparation(prepare, executor, limits, POLICY, on_done)
        for i in range(200):
            preparation.put(Ticket(str(i), 0.0, 1 + i), make_item(str(i), 1 + i))
        assert all_done.wait(60)
    assert sorted(done, key=int) == [str(i) for i in range(200)] and preparation.held_bytes == 0
