"""The driver of the request flow: streams, connections, Serve's calls and the timer, on a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config.settings import AdmissionArgs
from cluster.errors import InternalError, RequestError, UnavailableError
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, Cancel, FinishReason, Ping, StartDecode, TokenEvent, Tokens
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.admission.controller import AdmissionController
from router.admission.queue import AdmissionQueue, Capacity
from router.dispatcher import Dispatcher, TokenStream
from router.flow.continuation import MAX_REPLAYS
from router.flow.placer import Placer
from router.flow.request_flow import RequestFlow, Timeouts
from router.flow.state import ClientRequest
from router.policy import ClusterView
from router.telemetry.timeline import RequestTimeline
from tests.fakes.local_prefill import LocalPrefillPolicy
from tests.fakes.placement import EPD

HANG_S = 60.0
TWO = GenerateRequest("r", Prompt((1, 2, 3)), (SamplingParams(), SamplingParams()), StopParams(3))
ONE = msgspec.structs.replace(TWO, sampling=(SamplingParams(),))


class FakeConnection:
    is_open, peer_last_read = True, None

    def __init__(self, peer_name: str) -> None:
        self.peer_name = peer_name
        self.sent: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> None:
        msgspec.msgpack.encode(message)
        if not isinstance(message, Ping):
            self.sent.append(message)

    async def aclose(self) -> None:
        pass


class Door:
    """With one decode worker, which computes prompts."""

    def __init__(self, first_token_s: float = 3600.0):
        flow = RequestFlow(
            Placer(
                LocalPrefillPolicy(), ClusterView(SchedulingPolicy(5.0, 2000.0, 0.3), 1.0, 2), block_size=16
            ),
            AdmissionController(AdmissionQueue(AdmissionArgs(), 0.3, Capacity(0, 0, 0))),
            Timeouts(first_token_s, 3600.0),
        )
        self.calls: dict[str, asyncio.Future[None]] = {}
        self.dispatcher = Dispatcher(flow, self._call_decode, None, SystemClock(), self._dial)
        self.connections: dict[str, FakeConnection] = {}

    async def join(self) -> None:
        members = self.dispatcher.members
        for role in EPD:
            member = Member(replica_id=role, role=role, address=role, model="", layout="", num_blocks=8)
            members.update(role, [member])
        while len(members.all_peers()) < len(EPD):
            await asyncio.sleep(0)

    async def _dial(self, address: str, *_: Any, **__: Any) -> Any:
        self.connections[address] = FakeConnection(address)
        return self.connections[address]

    async def _call_decode(self, replica_id: str, request_id: str) -> None:
        await self.calls.setdefault(request_id, asyncio.get_running_loop().create_future())

    def streams(self, request: GenerateRequest, hashes: tuple[bytes, ...] = ()) -> list[TokenStream]:
        return self.dispatcher.generate(ClientRequest(request, (), hashes, RequestTimeline(0.0)))

    def token(self, token_id: int, choice: int = 0, reason: FinishReason | None = None) -> None:
        event = TokenEvent("r", (token_id,), reason, choice_idx=choice)
        peer = next(peer for peer in self.dispatcher.members.all_peers() if peer.member.role is Role.DECODE)
        self.dispatcher.on_message(peer, Tokens((event,)))

    @property
    def sent(self) -> list[AnyMessage]:
        return self.connections[Role.DECODE].sent


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door()
    await door.join()
    yield door
    for call in door.calls.values():
        call.cancel()
    async with asyncio.timeout(HANG_S):
        while not door.dispatcher.is_idle:
            await asyncio.sleep(0)


@pytest.fixture
async def timers(door, monkeypatch) -> list[asyncio.TimerHandle]:
    """All that the door sets."""
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *args: timers.append(call_later(*args)) or timers[-1])
    return timers


def set_ones(timers: list[asyncio.TimerHandle]) -> list[asyncio.TimerHandle]:
    now = asyncio.get_running_loop().time()
    return [timer for timer in timers if not timer.cancelled() and timer.when() > now]


async def begin(stream: TokenStream) -> asyncio.Task[TokenEvent]:
    """Something reads it."""
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return reading


async def test_a_request_is_sent_when_a_choice_is_first_read_and_once(door):
    first, second = door.streams(TWO)
    assert door.sent == []
    reading = [await begin(first), await begin(second)]
    assert [type(message) for message in door.sent] == [StartDecode] and "r" in door.calls
    for choice in (0, 1):
        door.token(5 + choice, choice, FinishReason.STOP)
    assert [(await each).token_ids for each in reading] == [(5,), (6,)]
    assert [event async for event in first] == []


async def test_tokens_wait_for_a_slow_reader(door):
    (stream,) = door.streams(ONE)
    reading = await begin(stream)
    door.token(5)
    door.token(6)
    door.token(7, reason=FinishReason.LENGTH)
    assert (await reading).token_ids == (5,)
    assert [event.token_ids async for event in stream] == [(6,), (7,)]


async def test_a_reader_that_is_cancelled_cancels_its_request(door):
    (stream,) = door.streams(ONE)
    reading = await begin(stream)
    reading.cancel()
    await asyncio.wait([reading])
    assert door.sent[-1] == Cancel("r")


async def test_a_request_that_is_never_read_is_never_sent(door):
    for stream in door.streams(TWO):
        await stream.aclose()
        await stream.aclose()
    assert door.sent == []


async def test_a_choice_that_was_closed_before_is_not_computed(door):
    first, second = door.streams(TWO)
    await first.aclose()
    reading = await begin(second)
    assert door.sent[-1] == Cancel("r", 0)
    door.token(6, 1, FinishReason.STOP)
    assert (await reading).token_ids == (6,)


async def test_every_choice_of_a_refused_request_is_refused_though_read_late(door):
    for stream in door.streams(msgspec.structs.replace(TWO, stop=StopParams(9999))):
        with pytest.raises(RequestError, match="KV cache"):
            await anext(stream)
    assert door.sent == []


async def test_a_serve_call_that_fails_again_and_again_ends_the_request(door):
    (stream,) = door.streams(ONE)
    reading = await begin(stream)
    for name in ("r", *(f"r.{i}" for i in range(1, MAX_REPLAYS + 1))):
        async with asyncio.timeout(HANG_S):
            while name not in door.calls:
                await asyncio.sleep(0)
        door.calls[name].set_exception(RuntimeError("too many requests"))
    with pytest.raises(UnavailableError, match="refused the request: too many"):
        await asyncio.wait_for(reading, HANG_S)


async def test_a_message_that_cannot_be_encoded_ends_its_request_and_calls_nothing(door):
    (stream,) = door.streams(msgspec.structs.replace(ONE, sampling=(SamplingParams(top_k=1 << 64),)))
    with pytest.raises(InternalError):
        await anext(stream)
    assert not door.calls


async def test_the_deadline_of_the_first_token_needs_no_message():
    door = Door(first_token_s=0.02)
    await door.join()
    (stream,) = door.streams(ONE)
    with pytest.raises(UnavailableError, match="out of time"):
        await asyncio.wait_for(anext(stream), HANG_S)
    assert door.dispatcher.is_idle
    door.calls["r"].cancel()


async def test_an_idle_door_has_no_timer(door, timers):
    (stream,) = door.streams(ONE)
    reading = await begin(stream)
    assert set_ones(timers), "it looks at its workers"
    door.token(5, reason=FinishReason.STOP)
    await reading
    async with asyncio.timeout(HANG_S):
        while set_ones(timers):
            await asyncio.sleep(0.01)


async def test_one_timer_is_set_and_it_is_the_earliest_that_is_wanted(door, timers, monkeypatch):
    now, dispatcher = SystemClock().now(), door.dispatcher
    peer = dispatcher.members.all_peers()[0]
    for wanted_s, set_s in ((50.0, [50]), (90.0, [50]), (20.0, [20]), (None, [])):
        at = None if wanted_s is None else now + wanted_s
        monkeypatch.setattr(dispatcher.flow, "next_timer", lambda at=at: at)
        dispatcher.on_listed(peer)
        assert [round(timer.when() - timers[0].when()) + 50 for timer in set_ones(timers)] == set_s


async def test_a_worker_that_drains_is_disconnected_with_its_last_request(door):
    (stream,) = door.streams(ONE)
    reading = await begin(stream)
    members = door.dispatcher.members
    members.update(Role.DECODE, [])
    assert len(members.all_peers()) == len(EPD)
    door.token(5, reason=FinishReason.STOP)
    await reading
    assert [peer.member.role for peer in members.all_peers()] == [Role.ENCODE, Role.PREFILL]
