"""Workers that stop, as a door sees them, on a clock that a test sets."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.types.members import Member, Role
from cluster.types.messages import Encoded, Ping, Pong, Stalled
from router.flow.watch import ANSWER_S, LOOK_EVERY_S, MOVE_S, QUIET_S, PeerWatch
from router.members import Peer
from tests.fakes.clock import ManualClock


class Worker:
    def __init__(self, name: str):
        self.peer = Peer(Member(name, Role.DECODE, "", "", "", 8))
        self.peer.attach(self)  # type: ignore[arg-type]
        self.num_asked = 0
        self.is_stopped = False
        self.peer.num_flights = 1

    def send(self, message: Any) -> None:
        assert message == Ping()
        self.num_asked += 1


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.changes: list[tuple[str, bool]] = []
        self.moved: list[str] = []
        self.watch = PeerWatch(
            self.clock,
            lambda peer: self.changes.append((peer.member.replica_id, peer.is_silent)),
            lambda peer: self.moved.append(peer.member.replica_id),
        )
        self.workers = {name: Worker(name) for name in ("a", "b")}
        for worker in self.workers.values():
            self.watch.add(worker.peer)

    def wait(self, seconds: float) -> None:
        """Looks on time; whoever is not stopped answers what it was asked."""
        for _ in range(int(seconds / LOOK_EVERY_S)):
            self.clock.at += LOOK_EVERY_S
            before = {name: worker.num_asked for name, worker in self.workers.items()}
            self.watch.look()
            for name, worker in self.workers.items():
                if worker.num_asked > before[name] and not worker.is_stopped:
                    self.watch.heard(worker.peer)


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
    world.watch.heard(stopped.peer)  # the answer to what it was asked then
    world.wait(10)
    assert world.changes == [("a", True), ("a", False)]


def test_workers_without_a_request_of_this_door_are_not_asked(world):
    for worker in world.workers.values():
        worker.peer.num_flights = 0
    world.wait(60)
    assert all(worker.num_asked == 0 for worker in world.workers.values())
    assert world.watch.look() is False


def test_a_worker_that_speaks_is_not_asked(world):
    for _ in range(40):
        world.watch.heard(world.workers["a"].peer)
        world.wait(LOOK_EVERY_S)
    assert world.workers["a"].num_asked == 0 and world.workers["b"].num_asked > 10


def test_an_idle_worker_that_has_stopped_is_found_with_its_first_request(world):
    stopped = world.workers["a"]
    stopped.peer.num_flights, stopped.is_stopped = 0, True
    world.wait(60)
    assert world.changes == []
    stopped.peer.num_flights = 1
    world.wait(ANSWER_S + 2 * LOOK_EVERY_S)
    assert world.changes == [("a", True)]


def test_a_door_that_was_held_up_blames_nobody(world):
    for worker in world.workers.values():
        worker.is_stopped = True  # has answered, but this door has not read it
    world.wait(QUIET_S + LOOK_EVERY_S)
    world.clock.at += 30.0
    world.watch.look()
    assert world.changes == []
    for worker in world.workers.values():
        worker.is_stopped = False
        world.watch.heard(worker.peer)
    world.wait(10)
    assert world.changes == []


def test_what_a_worker_says_of_its_threads_counts_though_it_answers(world):
    world.watch.told(world.workers["a"].peer, True)
    world.wait(MOVE_S - LOOK_EVERY_S)
    assert world.changes == [("a", True)] and world.moved == []
    world.wait(10)
    assert world.moved == ["a"], "its items are moved once"
    world.watch.told(world.workers["a"].peer, False)
    assert world.changes == [("a", True), ("a", False)]


def test_a_worker_that_is_gone_is_forgotten(world):
    world.workers["a"].is_stopped = True
    world.watch.remove(world.workers["a"].peer)
    world.watch.told(world.workers["a"].peer, True)
    world.wait(10)
    assert world.changes == []


async def test_a_stalled_worker_is_silent_in_the_policys_eyes_until_it_moves(door):
    pool = door.cluster.decodes
    door.tell(Role.DECODE, Stalled(("engine",)))
    assert pool.is_silent[pool.slots["decode"]]
    door.tell(Role.DECODE, Pong())
    assert pool.is_silent[pool.slots["decode"]], "its event loop answers, its engine does not"
    door.tell(Role.DECODE, Stalled(()))
    assert not pool.is_silent.any()


async def test_the_last_worker_of_a_pool_serves_though_it_is_silent(door):
    for role in Role:
        door.tell(role, Stalled(("engine",)))
    task, _ = await door.start()
    assert all(door.sent(role) for role in Role)
    door.tell(Role.ENCODE, Encoded("r", 0, cached=False))
    task.cancel()
