"""A connection is cut while a message about a grant is on its way: the blocks are free as soon as the two are
connected again, and not when the lease's time is over."""

from __future__ import annotations

from random import Random

import pytest

from cluster.types.members import Role
from cluster.types.messages import ReturnGrant
from tests.fakes.requests import make_item, make_request
from tests.histories.network import End
from tests.histories.oracle import check_answers, check_budgets, check_ledgers
from tests.histories.world import Shape, World

SOON_S = 1.0
EPD = (Role.ENCODE, Role.PREFILL, Role.DECODE)


class Small:
    """One worker of each phase. The seed decides how long messages take."""

    def __init__(self, seed: int, is_one_host: bool = True):
        self.world = World(Random(seed), Shape(EPD, is_one_host=is_one_host))
        self.world.scheduler.run_until(0.1)

    def submit(self) -> None:
        item = make_item("a", 5)
        self.world.clients.submit(self.world.doors[0], make_request("r", 9, [item]), [item])

    def cut_when_sent(self, kind: str) -> None:
        self.world.network.when_sent[kind] = lambda end, _: self.cut(end)

    def cut(self, end: End) -> None:
        assert end.is_open
        self.world.network.cut(end, at_once=True)

    def run(self, seconds: float) -> None:
        self.world.scheduler.run_until(self.world.scheduler.now + seconds)
        check_budgets(self.world)

    @property
    def leases(self) -> list[str]:
        return [lease_id for worker in self.world.live_workers for lease_id in worker.open_leases]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "kind", ["FeatureGranted", "EncodeTarget", "GrantPassed", "DecodeGranted", "DecodeTarget"]
)
def test_blocks_are_free_soon_after_the_connection_of_their_grant_was_cut(kind, seed):
    small = Small(seed, is_one_host=False)
    with small.world.lease_ids():
        small.submit()
        small.cut_when_sent(kind)
        small.run(SOON_S)
        assert not small.world.network.when_sent and not small.leases
        assert check_answers(small.world, ()) == {"right": 1}
        check_ledgers(small.world)


def test_a_grant_that_is_returned_over_a_connection_that_breaks_is_returned_over_the_next():
    small = Small(1)
    with small.world.lease_ids():
        small.submit()
        door, story = small.world.doors[0], small.world.clients.stories["r"]
        small.world.network.when_sent["DecodeGranted"] = lambda *_: door.later(
            0.0, small.world.clients.leave, story, 0
        )
        small.cut_when_sent("ReturnGrant")
        small.run(SOON_S)
        assert not small.world.network.when_sent and not small.leases
        assert small.world.network.num_heard[ReturnGrant.__name__] == 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_grant_on_its_way_to_a_door_that_has_done_with_its_worker_is_taken_back(role):
    """The worker drains: the door closes the connection and does not dial again (seed 66298)."""
    small = Small(1, is_one_host=False)
    with small.world.lease_ids():
        small.submit()
        door, story = small.world.doors[0], small.world.clients.stories["r"]

        def drain(*_: object) -> None:
            door.later(0.0, door.members.update, role, [])
            door.later(0.0, small.world.clients.leave, story, 0)

        small.world.network.when_sent["FeatureGranted" if role is Role.PREFILL else "DecodeGranted"] = drain
        small.run(SOON_S)
        assert small.world.network.num_heard["Goodbye"] == 1 and not small.leases


def test_of_a_writer_that_has_ended_the_owner_is_told_over_the_next_connection():
    """It had the grant, and the owner did not know that."""
    small = Small(1)
    world = small.world
    with world.lease_ids():
        small.submit()
        world.network.when_arrived["DecodeTarget"] = lambda end, _: world.kill(end.process)
        world.network.when_sent["DecodeTarget"] = lambda *_: small.cut_when_sent("GrantPassed")
        small.run(0.5)
        assert len(small.leases) == 1, "no writer may be left, but what it has sent may be on its way"
        small.run(2.5)
        assert not small.leases
