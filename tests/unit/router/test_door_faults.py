"""A door whose N-th operation fails, for every N: one request may end, by name; the others are answered, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config.settings import AdmissionArgs, DoorArgs
from cluster.errors import ClusterError, InternalError, UnavailableError, to_info
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Member, Role
from cluster.types.messages import (
    AnyMessage,
    BlocksChanged,
    CacheChanged,
    DecodeGranted,
    Encoded,
    Failed,
    FeatureGranted,
    FinishReason,
    LoadReport,
    Measured,
    Preempted,
    PrefillAdmitted,
    StartEncode,
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.types.transfer import Grant
from router.admission.entrance import Entrance
from router.admission.queue import AdmissionQueue, Capacity
from router.flow.dispatch import Dispatcher
from router.flow.placing import Placing
from router.members import Peer
from router.policy import ClusterView, JointPolicy
from router.telemetry.timeline import RequestTimeline

CLUSTER = (
    "started", "item_moved", "item_done", "prefilled", "ended", "observed", "reported", "media_changed", "blocks_changed", "measured",
)  # fmt: skip
QUEUE = ("offer", "freed", "encoded", "done", "leave", "expired", "report", "resize", "next_deadline")
FREEING = ("ended", "leave")  # what fails here before it has done anything leaves what it should have freed


class Injected(Exception):
    """A bug of this door."""


@dataclass
class Faults:
    """Counts operations and lets one of them fail: before it has done anything, or after all of it."""

    fail_at: int
    is_late: bool
    count: int = 0
    failed: str = ""

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, partial(self._call, name, getattr(owner, name)))

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_late or name not in FREEING:
            self.count += 1
        fails = self.count == self.fail_at and not self.failed and (self.is_late or name not in FREEING)
        if fails:
            self.failed = name
        result = None if fails and not self.is_late else function(*args, **kwargs)
        if fails:
            raise Injected(name)
        return result


@dataclass
class Connection:
    sent: list[AnyMessage] = field(default_factory=list)

    def send(self, message: AnyMessage) -> None:
        msgspec.msgpack.encode(message)
        self.sent.append(message)


class Members:
    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.connections: dict[str, Connection] = {}
        for name, role in (("e0", Role.ENCODE), ("e1", Role.ENCODE), ("p", Role.PREFILL), ("d", Role.DECODE)):
            self.peers[name] = Peer(Member(name, role, "", "", "", 64))
            self.connections[name] = Connection()
            self.peers[name].attach(self.connections[name])  # type: ignore[arg-type]

    def peer(self, name: str) -> Peer:
        return self.peers[name]

    def close_if_drained(self, peer: Peer) -> None:
        pass


def request_of(name: str, has_media: bool, **fields: Any) -> tuple[GenerateRequest, list[MediaItem]]:
    geometry = MediaGeometry(3)
    items = [MediaItem(Modality.IMAGE, b"png", f"hash-{name}", geometry)] if has_media else []
    placed = tuple(PlacedMedia(item.modality, item.media_hash, ((1, 3),), geometry) for item in items)
    prompt = Prompt((1, 9, 9, 9, 2), placed)
    return GenerateRequest(name, prompt, (SamplingParams(**fields),), StopParams(3)), items


class World:
    def __init__(self, faults: Faults):
        self.members = Members()
        self.cluster = ClusterView(SchedulingPolicy(5.0, 2000.0, 0.3), 1.0, 2)
        self.queue = AdmissionQueue(AdmissionArgs(max_outstanding_s=1e-9), 0.3, Capacity(0, 0, 0))
        policy, clock = JointPolicy(), SystemClock()
        self.calls: list[asyncio.Future[None]] = []
        self.faults = faults
        self.ledgers: list[RequestTimeline] = []
        self.door = Dispatcher(
            Placing(policy, self.cluster, 16),
            Entrance(self.queue, clock),
            self._call_decode,
            DoorArgs(),
            clock,
        )
        self.door.members = self.members  # type: ignore[assignment]
        for peer in self.members.peers.values():
            self.door.on_joined(peer)
        faults.wrap(self.cluster, *CLUSTER)
        faults.wrap(self.queue, *QUEUE)
        faults.wrap(policy, "decide", "place_item")
        for connection in self.members.connections.values():
            faults.wrap(connection, "send")

    async def _call_decode(self, replica_id: str, request_id: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append(future)
        await future

    def tell(self, name: str, message: AnyMessage) -> None:
        """What a connection does; an error in here would end it."""
        self.door.on_message(self.members.peers[name], message)

    def ask(self, name: str, has_media: bool, **fields: Any) -> asyncio.Task[list[int]]:
        request, items = request_of(name, has_media, **fields)
        ledger = RequestTimeline(0.0)
        self.faults.wrap(ledger, "launched", "encoded")
        (stream,) = self.door.generate(request, items, [], ledger)

        async def read() -> list[int]:
            try:
                return [token_id async for event in stream for token_id in event.token_ids]
            finally:
                await stream.aclose()

        return asyncio.ensure_future(read())

    def starts(self, name: str) -> bool:
        """Whether an encoder was asked for an item."""
        return any(isinstance(message, StartEncode) for message in self.members.connections[name].sent)


def grant(lease_id: str) -> Grant:
    return Grant(lease_id, b"", 0, 8, "", (0,), (0,), 1.0)


def tokens(name: str, *token_ids: int, reason: FinishReason | None = None) -> Tokens:
    return Tokens((TokenEvent(name, token_ids, reason),), LoadReport(num_used_blocks=1))


async def play(world: World) -> dict[str, asyncio.Task[list[int]]]:
    """Three requests are let in, one waits behind them. An item of one goes to another encoder, another is preempted."""
    tasks = {name: world.ask(name, name == "media") for name in ("media", "text", "waiting", "last")}
    await settle()
    world.tell("p", Measured(ServiceCurves(prefill=Curve(0.01, 1e-4))))
    world.tell("e0", CacheChanged(("elsewhere",), ()))
    world.tell("p", BlocksChanged((b"block",), ()))
    for name in ("media", "text"):
        world.tell("p", PrefillAdmitted(name))
        await settle()
        world.tell("d", DecodeGranted(name, grant(f"d-{name}")))
    first = next((n for n in ("e0", "e1") if world.starts(n)), "e0")
    second = "e1" if first == "e0" else "e0"
    world.tell(first, Failed("media", to_info(UnavailableError("gave it up")), 0))
    world.tell("p", FeatureGranted("media", 0, grant("p-media")))
    world.tell(second, Encoded("media", 0, cached=False))
    for name in ("media", "text"):
        world.tell("p", tokens(name, 5))
    await settle()
    world.tell("d", Tokens((TokenEvent("media", (6,)), TokenEvent("text", (6,))), LoadReport()))
    await settle()
    world.tell("d", Preempted("text"))
    await settle()
    for _ in range(3):  # whoever is let in when another has ended
        for name in list(world.door._flights):
            world.tell("p", PrefillAdmitted(name))
            await settle()
            world.tell("p", tokens(name, 7, reason=FinishReason.STOP))
        await settle()
    return tasks


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def fail_at(n: int, is_late: bool) -> tuple[Faults, World]:
    faults = Faults(n, is_late)
    world = World(faults)
    tasks = await play(world)
    async with asyncio.timeout(10):
        outcomes = dict(
            zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True)
        )
    for call in world.calls:
        call.cancel()
    await settle()
    errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException)}
    assert len(errors) <= 1, errors
    for error in errors.values():
        assert isinstance(error, InternalError) and "log" in error.message
        assert world.door.num_crashed == 1 or faults.failed in QUEUE
    for name, outcome in outcomes.items():
        if name not in errors:
            assert outcome, f"{name} ended without an answer"
    audit(world)
    return faults, world


def audit(world: World) -> None:
    assert world.door.is_idle, "a request is left at the door"
    assert all(peer.num_flights == 0 for peer in world.members.peers.values())
    for pool in (world.cluster.encoders, world.cluster.prefills, world.cluster.decodes):
        assert not pool.sent_units.any() and not pool.sent_requests.any() and not pool.sent_blocks.any()
    assert not world.cluster.media._expected and not len(world.cluster.pending)
    assert not world.door._calls


@pytest.mark.parametrize("is_late", [False, True], ids=["not done", "done"])
async def test_an_operation_that_fails_ends_one_request_at_most(is_late, caplog):
    caplog.set_level("CRITICAL")
    seen = set()
    for n in range(1, 1000):
        faults, _ = await fail_at(n, is_late)
        if not faults.failed:
            break
        seen.add(faults.failed)
    assert not faults.failed, "the operations have no end"
    assert {
        "send",
        "started",
        "decide",
        "place_item",
        "offer",
        "freed",
        "done",
        "launched",
        "encoded",
    } <= seen


async def test_a_number_that_does_not_fit_a_message_ends_its_request_alone():
    world = World(Faults(0, False))
    good, bad = world.ask("good", True), world.ask("bad", True, top_k=1 << 64)
    await settle()
    with pytest.raises(InternalError):
        await bad
    assert not good.done() and world.door.num_flights == 1 and world.door.num_crashed == 1
    world.tell("p", tokens("good", 5, reason=FinishReason.STOP))
    assert await good == [5]
    audit(world)


async def test_a_request_on_a_worker_that_has_just_left_is_not_charged_for():
    """The policy's view of the cluster and the member table differ for a moment."""
    world = World(Faults(0, False))
    del world.members.peers["d"]
    task = world.ask("r", True)
    with pytest.raises(ClusterError):
        await task
    audit(world)
