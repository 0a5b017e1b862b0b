"""Workers that stop, as a door sees them, on a clock that a test sets."""

from __future__ import annotations

import pytest

from cluster.types.members import Member, Role
from cluster.types.messages import Pong, Stalled
from router.flow.state import WorkerState
from router.flow.watch import (
    ANSWER_S,
    FAILURES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LOOK_EVERY_S,
    MOVE_S,
    QUIET_S,
    WorkerWatch,
)
from tests.fakes.placement import EPD


class Worker:
    def __init__(self, name: str):
        self.state = WorkerState(
            Member(replica_id=name, role=Role.DECODE, address="", model="", layout="", num_blocks=8),
            num_requests=1,
        )
        self.num_asked = 0
        self.is_stopped = False


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.changes: list[tuple[str, bool]] = []
        self.moved: list[str] = []
        self.workers = {name: Worker(name) for name in ("a", "b")}
        self.watch = WorkerWatch(
            self._ping,
            lambda worker: self.changes.append((worker.replica_id, worker.is_avoided)),
            lambda worker, _: self.moved.append(worker.replica_id),
        )
        for worker in self.workers.values():
            self.watch.add(worker.state, self.now)
        self.watch.begin(self.now)

    def _ping(self, worker: WorkerState) -> None:
        self.workers[worker.replica_id].num_asked += 1

    def heard(self, name: str) -> None:
        self.watch.heard(self.workers[name].state, self.now)

    def wait(self, seconds: float) -> None:
        """Looks on time; a worker that is not stopped answers what it was asked."""
        for _ in range(int(seconds / LOOK_EVERY_S)):
            self.now += LOOK_EVERY_S
            before = {name: worker.num_asked for name, worker in self.workers.items()}
            self.watch.look_if_due(self.now)
            for name, worker in self.workers.items():
                if worker.num_asked > before[name] and not worker.is_stopped:
                    self.heard(name)


@pytest.fixture
def world() -> World:
    return World()


def test_a_worker_that_stops_is_known_within_two_seconds_and_used_again_when_it_moves(world):
    world.wait(10)
    assert world.changes == []
    stopped = world.workers["a"]
    stopped.is_stopped = True
    world.wait(QUIET_S + ANSWER_S + 2 * LOOK_EVERY_S)
    assert QUIET_S + ANSWER_S + 2 * LOOK_EVERY_S < 2.0
    assert world.changes == [("a", True)]
    world.wait(60)
    stopped.is_stopped = False
    world.heard("a")  # the answer to what it was asked then
    world.wait(10)
    assert world.changes == [("a", True), ("a", False)]


def test_workers_without_a_request_of_this_door_are_not_asked(world):
    for worker in world.workers.values():
        worker.state.num_requests = 0
    world.wait(60)
    assert all(worker.num_asked == 0 for worker in world.workers.values())
    assert world.watch.next_look_at is None


def test_a_worker_that_speaks_is_not_asked(world):
    for _ in range(40):
        world.heard("a")
        world.wait(LOOK_EVERY_S)
    assert world.workers["a"].num_asked == 0 and world.workers["b"].num_asked > 10


def test_an_idle_worker_that_has_stopped_is_found_with_its_first_request(world):
    stopped = world.workers["a"]
    stopped.state.num_requests, stopped.is_stopped = 0, True
    world.wait(60)
    assert world.changes == []
    stopped.state.num_requests = 1
    world.watch.begin(world.now)
    world.wait(ANSWER_S + 2 * LOOK_EVERY_S)
    assert world.changes == [("a", True)]


def test_a_door_that_was_held_up_concludes_nothing_about_workers(world):
    for worker in world.workers.values():
        worker.is_stopped = True  # has answered, but this door has not read it
    world.wait(QUIET_S + LOOK_EVERY_S)
    world.now += 30.0
    world.watch.look_if_due(world.now)
    assert world.changes == []
    for name, worker in world.workers.items():
        worker.is_stopped = False
        world.heard(name)
    world.wait(10)
    assert world.changes == []


def test_what_a_worker_says_of_its_threads_counts_though_it_answers(world):
    world.watch.told(world.workers["a"].state, True, world.now)
    world.wait(MOVE_S - LOOK_EVERY_S)
    assert world.changes == [("a", True)] and world.moved == []
    world.wait(10)
    assert world.moved == ["a"], "its items are moved once"
    world.watch.told(world.workers["a"].state, False, world.now)
    assert world.changes == [("a", True), ("a", False)]


def test_a_worker_that_keeps_failing_is_avoided_for_longer_and_longer(world):
    failing = world.workers["a"].state
    for _ in range(FAILURES - 1):
        world.watch.failed(failing, world.now)
    assert world.changes == []
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        world.watch.failed(failing, world.now)
        assert world.changes.pop() == ("a", True)
        world.wait(pause_s - LOOK_EVERY_S)
        assert world.changes == [] and world.moved == []
        world.wait(LOOK_EVERY_S)
        assert world.changes.pop() == ("a", False)
    for _ in range(2000):  # 2**1024 is no float
        world.watch.failed(failing, world.now)
    world.changes.clear()
    world.wait(LONGEST_PAUSE_S)
    assert world.changes == [("a", False)]


def test_a_worker_that_succeeds_starts_from_the_beginning(world):
    failing = world.workers["a"].state
    for _ in range(FAILURES + 3):
        world.watch.failed(failing, world.now)
    world.watch.succeeded(failing, world.now)
    assert world.changes == [("a", True), ("a", False)]
    world.watch.failed(failing, world.now)
    assert len(world.changes) == 2


def test_a_worker_that_is_gone_is_forgotten(world):
    world.workers["a"].is_stopped = True
    world.watch.remove(world.workers["a"].state)
    world.watch.told(world.workers["a"].state, True, world.now)
    world.wait(10)
    assert world.changes == []


def test_a_stalled_worker_is_silent_in_the_policys_eyes_until_it_moves(door):
    pool = door.cluster.decodes
    door.tell(Role.DECODE, Stalled(("engine",)))
    assert pool.is_avoided[pool.slots["decode"]]
    door.tell(Role.DECODE, Pong())
    assert pool.is_avoided[pool.slots["decode"]], "its event loop answers, its engine does not"
    door.tell(Role.DECODE, Stalled(()))
    assert not pool.is_avoided.any()


def test_the_last_worker_of_a_pool_serves_though_it_is_silent(door):
    for role in EPD:
        door.tell(role, Stalled(("engine",)))
    door.start_media()
    assert all(door.sent(role) for role in EPD)


def test_items_leave_an_encoder_that_makes_no_progress_for_long(door):
    door.join(Role.ENCODE, "encode-2")
    door.start_media()
    first = next(name for name in ("encode", "encode-2") if door.sent(name))
    second = "encode-2" if first == "encode" else "encode"
    for role in (Role.PREFILL, Role.DECODE, second):
        door.tell(role, Pong())
    door.wait(QUIET_S + ANSWER_S + 2 * LOOK_EVERY_S)
    door.tell(second, Pong())
    assert door.flow.num_silences
    door.wait(MOVE_S)
    assert door.num_pings and "StartEncode" in door.sent(second), "the other answered what it was asked last"
    assert door.sent(first)[-1] == "Cancel"
