"""A request flow whose N-th operation fails, for every N: one request may end, by name; the others are
answered, and nothing is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pytest

from cluster.errors import InternalError, UnavailableError, to_info
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Role
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
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.flow.outputs import Output, Send
from router.policy import JointPolicy
from router.telemetry.timeline import RequestTimeline
from tests.fakes.placement import EPD
from tests.fakes.scripted_flow import Reader, ScriptedFlow, grant

E_PD = (Role.ENCODE, Role.LANGUAGE)
CLUSTER = (
    "started", "item_moved", "item_done", "prefilled", "ended", "observed", "reported", "media_changed",
    "blocks_changed", "measured",
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


def request_of(name: str, has_media: bool, **fields: Any) -> tuple[GenerateRequest, list[MediaItem]]:
    geometry = MediaGeometry(3)
    items = [MediaItem(Modality.IMAGE, b"png", f"hash-{name}", geometry)] if has_media else []
    placed = tuple(PlacedMedia(item.modality, item.media_hash, ((1, 3),), geometry) for item in items)
    prompt = Prompt((1, 9, 9, 9, 2), placed)
    return GenerateRequest(name, prompt, (SamplingParams(**fields),), StopParams(3)), items


class World(ScriptedFlow):
    """With two encoders and a place for two requests."""

    def __init__(self, faults: Faults, roles: Sequence[Role] = EPD):
        policy = JointPolicy()
        super().__init__(policy, roles, max_outstanding_s=1e-9)
        self.decode = roles[-1]
        self.prefill = roles[1]  # the same worker, if there are two roles
        self.join(Role.ENCODE, "encode-2")
        self.faults = faults
        faults.wrap(self.cluster, *CLUSTER)
        faults.wrap(self.queue, *QUEUE)
        faults.wrap(policy, "decide", "place_item")
        faults.wrap(self, "send")
        self.cannot_send = self._cannot_send

    def send(self) -> None:
        """One message; a fault is what the driver meets when it sends."""

    def _cannot_send(self, message: AnyMessage) -> bool:
        msgspec.msgpack.encode(message)
        self.send()
        return False

    def _carry_out(self, output: Output) -> None:
        try:
            super()._carry_out(output)
        except Exception as error:
            assert isinstance(output, Send), error
            if output.request_id:
                self.flow.on_send_failed(output.request_id, error, self.now)

    def ask(self, name: str, has_media: bool, **fields: Any) -> Reader:
        request, items = request_of(name, has_media, **fields)
        timeline = RequestTimeline(0.0)
        self.faults.wrap(timeline, "placed", "encoded")
        (reader,) = self.submit(request, items, timeline=timeline)
        return reader


def tokens(name: str, *token_ids: int, reason: FinishReason | None = None) -> Tokens:
    return Tokens((TokenEvent(name, token_ids, reason),), LoadReport(num_used_blocks=1))


def play(world: World) -> dict[str, Reader]:
    """Two requests are admitted, two wait. An item of one goes to another encoder, another request is
    preempted."""
    readers = {name: world.ask(name, name == "media") for name in ("media", "text", "waiting", "last")}
    prefill, decode = world.prefill, world.decode
    world.tell(prefill, Measured(ServiceCurves(prefill=Curve(0.01, 1e-4))))
    world.tell("encode", CacheChanged(("elsewhere",), ()))
    world.tell(prefill, BlocksChanged((b"block",), ()))
    for name in ("media", "text") if prefill is not decode else ():
        world.tell(prefill, PrefillAdmitted(name))
        world.tell(decode, DecodeGranted(name, grant(f"d-{name}")))
    names = ("encode", "encode-2")
    first = next((name for name in names if "StartEncode" in world.sent(name)), "encode")
    second = next(name for name in names if name != first)
    world.tell(first, Failed("media", to_info(UnavailableError("gave it up")), 0))
    world.tell(prefill, FeatureGranted("media", 0, grant("p-media")))
    world.tell(second, Encoded("media", 0, cached=False))
    for name in ("media", "text"):
        world.tell(prefill, tokens(name, 5))
    world.tell(decode, Tokens((TokenEvent("media", (6,)), TokenEvent("text", (6,))), LoadReport()))
    world.tell(decode, Preempted("text"))
    for _ in range(3):  # waiting requests are admitted when others have ended
        world.wait(1.1)
        for name in list(world.flow.attempts):
            if prefill is not decode:
                world.tell(prefill, PrefillAdmitted(name))
            world.tell(prefill, tokens(name, 7, reason=FinishReason.STOP))
    return readers


def fail_at(n: int, is_late: bool, roles: Sequence[Role]) -> tuple[Faults, World]:
    faults = Faults(n, is_late)
    world = World(faults, roles)
    readers = play(world)
    errors = {name: reader.error for name, reader in readers.items() if reader.error is not None}
    assert len(errors) <= 1, errors
    for error in errors.values():
        assert isinstance(error, InternalError) and "log" in error.message
        assert world.flow.num_crashed == 1 or faults.failed in QUEUE
    for name, reader in readers.items():
        assert reader.has_ended, f"{name} hangs"
        assert name in errors or reader.token_ids, f"{name} ended without an answer"
    world.audit()
    return faults, world


@pytest.mark.parametrize(
    ("is_late", "roles"),
    [
        pytest.param(False, EPD, id="not done-E/P/D"),
        pytest.param(True, EPD, id="done-E/P/D", marks=pytest.mark.slow),
        pytest.param(False, E_PD, id="not done-E/PD", marks=pytest.mark.slow),
        pytest.param(True, E_PD, id="done-E/PD"),
    ],
)
def test_an_operation_that_fails_ends_one_request_at_most(is_late, roles, caplog):
    caplog.set_level("CRITICAL")
    seen = set()
    for n in range(1, 1000):
        faults, _ = fail_at(n, is_late, roles)
        if not faults.failed:
            break
        seen.add(faults.failed)
    assert not faults.failed, "the operations have no end"
    names = {"send", "started", "decide", "place_item", "offer", "freed", "done", "placed", "encoded"}
    assert names <= seen


def test_a_number_that_does_not_fit_a_message_ends_its_request_alone():
    world = World(Faults(0, False))
    good, bad = world.ask("good", True), world.ask("bad", True, top_k=1 << 64)
    assert isinstance(bad.error, InternalError)
    assert not good.has_ended and world.flow.num_running == 1 and world.flow.num_crashed == 1
    world.tell("prefill", tokens("good", 5, reason=FinishReason.STOP))
    assert good.token_ids == [5]
    world.audit()
