"""Which LoRA adapters a worker holds: sets of doors, slots, requests that go on with an unloaded adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.engine.adapters import HeldAdapters
from cluster.errors import ConfigError
from cluster.types.adapters import AdapterEntry, AdapterSet
from cluster.types.messages import AdaptersHeld
from cluster.worker.outbox import Outbox
from tests.fakes.workers import DOOR, Inbox, ManualExecutor

OWN = AdapterSet.of_settings({"own": "digest of own"})


class Rig:
    """A worker with two slots; its model begins with the adapter of the settings in the first."""

    def __init__(self) -> None:
        self.model: Any = SimpleNamespace(
            num_adapter_slots=2, adapter_slots={"digest of own": 1}, set_adapter=self.set_adapter
        )
        self.told: list[AdaptersHeld] = []
        self.outbox = Outbox(self.deliver)
        self.loader, self.engine_thread = ManualExecutor(), Inbox()
        self.unreadable: set[str] = set()
        self.held = HeldAdapters(self.model, OWN, self.load, self.outbox, self.loader)
        self.held.attach(self.engine_thread.call)
        self.outbox.add_door(DOOR)

    def deliver(self, batch: Any) -> None:
        self.told += [message for _, message in batch if isinstance(message, AdaptersHeld)]

    def set_adapter(self, slot: int, digest: str) -> None:
        kept = {digest: own for digest, own in self.model.adapter_slots.items() if own != slot}
        self.model.adapter_slots = kept | ({digest: slot} if digest else {})

    def load(self, entry: AdapterEntry, slot: int) -> None:
        assert slot not in self.model.adapter_slots.values()  # no request has it while it is written
        if entry.digest in self.unreadable:
            raise ConfigError("other content")

    def begin(self, *digests: str) -> None:
        """Between two steps, while requests with these adapters run."""
        requests: Any = [
            SimpleNamespace(request=SimpleNamespace(prompt=SimpleNamespace(adapter=own))) for own in digests
        ]
        self.held.settle(requests)

    def settle(self, *digests: str) -> AdaptersHeld:
        """`begin`, and what is loaded then. Returns what the door knows."""
        self.begin(*digests)
        while self.loader.jobs:
            self.loader.run_one()
        self.engine_thread.run()
        self.outbox.flush()
        return self.told[-1]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def entry(name: str) -> AdapterEntry:
    return AdapterEntry(name, f"digest of {name}", name)


def test_a_door_that_connects_learns_what_there_is(rig: Rig) -> None:
    assert rig.settle() == AdaptersHeld(OWN, ("digest of own",))


def test_an_adapter_comes_into_a_free_slot_between_steps(rig: Rig) -> None:
    wanted = OWN.next([*OWN.adapters, entry("a")])
    rig.held.want(wanted)
    assert not rig.held.has("digest of a")
    assert rig.settle() == AdaptersHeld(wanted, ("digest of a", "digest of own"))
    assert rig.held.has("digest of a") and rig.model.adapter_slots["digest of a"] == 2


def test_requests_go_on_with_an_adapter_that_was_unloaded_and_no_new_one_gets_it(rig: Rig) -> None:
    rig.held.want(first := OWN.next([*OWN.adapters, entry("a")]))
    rig.settle()
    rig.held.want(second := first.next([entry("a"), entry("b")]))
    told = rig.settle("digest of own", "")
    assert told == AdaptersHeld(second, ("digest of a",))  # b has no slot yet
    assert not rig.held.has("digest of own") and rig.model.adapter_slots["digest of own"] == 1
    assert rig.settle("digest of a").held == ("digest of a", "digest of b")
    assert rig.model.adapter_slots == {"digest of a": 2, "digest of b": 1}


def test_an_adapter_that_is_wanted_again_has_not_left_its_slot(rig: Rig) -> None:
    rig.held.want(without := OWN.next([]))
    assert rig.settle().held == ()
    rig.unreadable.add("digest of own")  # and is not read again
    rig.held.want(without.next(OWN.adapters))
    assert rig.settle().held == ("digest of own",)


def test_older_sets_and_those_of_other_settings_are_ignored(rig: Rig) -> None:
    rig.held.want(newer := OWN.next([entry("a")]).next([entry("b")]))
    for other in (OWN.next([entry("a")]), AdapterSet.of_settings({}).next([]).next([]).next([])):
        rig.held.want(other)
        assert rig.settle() == AdaptersHeld(newer, ("digest of b",))


def test_of_two_changes_at_once_one_wins_in_any_order() -> None:
    changes = [OWN.next([entry("a")]), OWN.next([entry("b")])]
    ends = []
    for order in (changes, changes[::-1]):
        rig = Rig()
        for change in order:
            rig.held.want(change)
        ends.append(rig.settle().wanted)
    assert ends[0] == ends[1]


def test_what_cannot_be_loaded_is_told_and_tried_with_the_next_set(rig: Rig) -> None:
    rig.unreadable.add("digest of a")
    rig.held.want(wanted := OWN.next([entry("a")]))
    (failure,) = rig.settle().failed
    assert (failure.digest, failure.error.message) == ("digest of a", "other content")
    assert not rig.held.has("digest of a")
    rig.unreadable.clear()
    rig.held.want(wanted.next(wanted.adapters))
    assert rig.settle() == AdaptersHeld(wanted.next(wanted.adapters), ("digest of a",))


def test_a_slot_has_no_adapter_while_it_is_loaded_and_is_loaded_once(rig: Rig) -> None:
    rig.held.want(OWN.next([entry("a"), entry("b")]))
    rig.begin()
    assert rig.model.adapter_slots == {} and len(rig.loader.jobs) == 2
    rig.begin()
    assert rig.settle().held == ("digest of a", "digest of b") and not rig.loader.jobs


def test_an_adapter_that_is_unloaded_while_it_is_loaded_may_not_be_used(rig: Rig) -> None:
    rig.held.want(wanted := OWN.next([*OWN.adapters, entry("a")]))
    rig.begin()
    rig.held.want(wanted.next(OWN.adapters))
    assert rig.settle().held == ("digest of own",)
    assert rig.model.adapter_slots == {"digest of own": 1}
