"""Loading and unloading of adapters at one door, with scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError, ModelNotFoundError, RequestError, UnavailableError, to_info
from cluster.types.adapters import AdapterEntry, AdapterFailure, AdapterSet
from cluster.types.members import Member, Role
from cluster.types.messages import AdaptersHeld, AnyMessage, SetAdapters
from router.adapters import ChangedMeanwhileError, DoorAdapters
from router.members import Peer
from tests.unit.config.test_adapters import folder, tensors

BEGIN = AdapterSet.of_settings({})
Answer = Callable[[AdapterSet], AdaptersHeld | None]


def holds(wanted: AdapterSet) -> AdaptersHeld:
    """A worker that has whatever it is asked for."""
    return AdaptersHeld(wanted, tuple(entry.digest for entry in wanted.adapters))


def silent(_: AdapterSet) -> None:
    """A worker that does not answer."""


def fails(wanted: AdapterSet) -> AdaptersHeld:
    error = to_info(ConfigError("there is no such file here"))
    return AdaptersHeld(wanted, (), tuple(AdapterFailure(entry.digest, error) for entry in wanted.adapters))


class Workers:
    """Stands for the member table: workers that answer to sets as scripted."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.answers: dict[str, Answer] = {}
        self.heard: list[tuple[str, AdapterSet]] = []
        self.door: Any = None

    def all_peers(self) -> list[Peer]:
        return list(self.peers.values())

    def send(self, replica_id: str, message: AnyMessage) -> None:
        assert isinstance(message, SetAdapters)
        self.heard.append((replica_id, message.wanted))
        if (told := self.answers[replica_id](message.wanted)) is not None:
            asyncio.get_running_loop().call_soon(self.tell, replica_id, told)

    def tell(self, replica_id: str, told: AdaptersHeld) -> None:
        self.peers[replica_id].adapters = told
        self.door.on_told(self.peers[replica_id])

    def join(self, role: Role, answer: Answer = holds, told: AdapterSet = BEGIN) -> None:
        member = Member(replica_id=role, role=role, address="", model="", layout="", num_blocks=8)
        connection: Any = SimpleNamespace()
        log: Any = SimpleNamespace()
        self.peers[role], self.answers[role] = Peer(member, connection, True, log), answer
        if role is not Role.ENCODE:
            self.tell(role, holds(told))


class Rig:
    def __init__(self, root: Path, **options: Any):
        self.root = root
        args = {"model_id": "m", "adapters_folder": str(root), "max_loras": 2, "max_lora_rank": 4}
        self.workers: Any = Workers()
        self.door = DoorAdapters(ClusterArgs.model_validate(args), **options)
        self.door.attach(self.workers)
        self.workers.door = self.door
        self.workers.join(Role.ENCODE)

    @property
    def names(self) -> list[str]:
        return [*self.door.models.adapters]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder(tmp_path / "a")
    folder(tmp_path / "b", weights=tensors(value=2.0))
    return tmp_path


@pytest.fixture
def rig(root: Path) -> Rig:
    rig = Rig(root)
    for role in (Role.PREFILL, Role.DECODE):
        rig.workers.join(role)
    return rig


async def test_a_name_is_served_when_every_worker_holds_its_adapter(rig: Rig) -> None:
    seen: list[list[str]] = []

    def slowly(wanted: AdapterSet) -> AdaptersHeld:
        seen.append(rig.names)
        return holds(wanted)

    rig.workers.answers[Role.DECODE] = slowly
    await rig.door.load("x", "a")
    assert seen == [[], ["x"]]  # before it was ready, and then
    first = rig.door.models.adapter_of("m:x")
    assert {replica_id for replica_id, _ in rig.workers.heard} == {Role.PREFILL, Role.DECODE}
    await rig.door.unload("x")
    assert rig.names == []
    await rig.door.load("x", "b")
    assert rig.door.models.adapter_of("x") != first


@pytest.mark.parametrize(
    ("name", "path", "told"),
    [("m", "a", "the model itself"), ("x", "../a", "adapters_folder"), ("x", ".", "adapter_config.json")],
)
async def test_what_cannot_be_loaded_is_refused_before_any_worker_hears(
    rig: Rig, name: str, path: str, told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        await rig.door.load(name, path)
    assert rig.workers.heard == []


async def test_names_are_loaded_once_and_no_more_than_there_is_room_for(rig: Rig) -> None:
    await rig.door.load("x", "a")
    with pytest.raises(RequestError, match="already"):
        await rig.door.load("x", "b")
    await rig.door.load("y", "a")
    with pytest.raises(RequestError, match="max_loras"):
        await rig.door.load("z", "b")
    with pytest.raises(ModelNotFoundError):
        await rig.door.unload("z")
    assert rig.names == ["x", "y"]


async def test_if_one_worker_cannot_load_no_worker_keeps_the_adapter(rig: Rig) -> None:
    rig.workers.answers[Role.DECODE] = fails
    with pytest.raises(RequestError, match="no such file here"):
        await rig.door.load("x", "a")
    await asyncio.sleep(0)
    assert all(peer.adapters.wanted.adapters == () for peer in rig.workers.all_peers() if peer.adapters)
    assert rig.names == []


async def test_if_a_worker_does_not_answer_no_worker_keeps_the_adapter(root: Path) -> None:
    rig = Rig(root, load_timeout_s=0.01)
    rig.workers.join(Role.PREFILL)
    rig.workers.join(Role.DECODE, silent)
    with pytest.raises(UnavailableError, match="not every worker"):
        await rig.door.load("x", "a")
    assert rig.workers.heard[-1][1].adapters == ()
    assert rig.workers.heard[-2][0] != rig.workers.heard[-1][0]  # both of them hear it
    del rig.workers.peers[Role.DECODE]  # without any worker that decodes nothing is loaded either
    with pytest.raises(UnavailableError, match="none for each phase"):
        await rig.door.load("x", "a")


async def test_a_worker_that_was_started_again_is_sent_what_it_lacks(rig: Rig) -> None:
    await rig.door.load("x", "a")
    rig.workers.heard.clear()
    rig.workers.join(Role.DECODE)
    ((replica_id, sent),) = rig.workers.heard
    assert replica_id == Role.DECODE and [entry.name for entry in sent.adapters] == ["x"]


async def test_a_door_learns_from_one_worker_and_tells_the_others(rig: Rig) -> None:
    known = BEGIN.next([AdapterEntry("x", "digest", "a")])
    rig.workers.tell(Role.PREFILL, holds(known))
    assert rig.door.models.adapter_of("x") == "digest"
    assert rig.workers.heard == [(Role.DECODE, known)]
    others = AdapterSet.of_settings({"y": "other settings"}).next([]).next([])
    rig.workers.tell(Role.PREFILL, holds(others))  # a worker of a cluster that is being replaced
    assert rig.names == ["x"]


async def test_if_another_door_changes_the_adapters_at_once_one_of_both_is_told(rig: Rig) -> None:
    theirs = BEGIN.next([AdapterEntry("y", "digest", "b")]).next([])
    rig.workers.answers[Role.DECODE] = lambda _: holds(theirs)
    with pytest.raises(ChangedMeanwhileError):
        await rig.door.load("x", "a")
    assert rig.names == []


async def test_without_a_folder_nothing_is_loaded() -> None:
    door = DoorAdapters(ClusterArgs.model_validate({"model_id": "m"}))
    for change in (door.load("x", "a"), door.unload("x")):
        with pytest.raises(RequestError, match="adapters_folder"):
            await change
