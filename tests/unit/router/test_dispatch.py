"""The dispatcher against scripted workers: what it sends, what the client gets, what is left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config.settings import AdmissionArgs, DoorArgs
from cluster.errors import MediaError, RequestError, UnavailableError, to_info
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Member, Role
from cluster.types.messages import (
    Admitted,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Encoded,
    EncodeTarget,
    Failed,
    FeatureGranted,
    FeatureShared,
    FinishReason,
    LoadReport,
    Preempted,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.types.transfer import Grant
from router.admission import AdmissionQueue, Capacity
from router.dispatch import Dispatcher
from router.entrance import Entrance
from router.ledger import Ledger
from router.members import Peer
from router.placing import Placing
from router.policy import ClusterView, JointPolicy
from router.streams import Launch
from tests.fakes.staying import StayingPolicy

ITEM = MediaItem(Modality.IMAGE, b"png", "hash", MediaGeometry(3))
REQUEST = GenerateRequest(
    "r",
    Prompt((1, 2, 9, 9, 9, 3), (PlacedMedia(ITEM.modality, "hash", ((2, 3),), ITEM.geometry),)),
    (SamplingParams(),),
    StopParams(3),
)


TEXT = GenerateRequest("r", Prompt((1, 2, 3)), (SamplingParams(), SamplingParams()), StopParams(3))


class FakeConnection:
    def __init__(self):
        self.sent: list = []

    def send(self, message) -> None:
        self.sent.append(message)


class FakeMembers:
    """The part of the member table that a dispatcher uses."""

    def __init__(self):
        self.peers = {role: Peer(Member(role.value, role, "", "", "", 8)) for role in Role}
        self.connections = {role: FakeConnection() for role in Role}
        self.drained: list[Peer] = []
        for role, peer in self.peers.items():
            peer.attach(self.connections[role])

    def peer(self, replica_id):
        return self.peers[Role(replica_id)]

    def close_if_drained(self, peer):
        self.drained.append(peer)


@dataclass
class Door:
    dispatcher: Dispatcher
    members: FakeMembers
    cluster: ClusterView
    calls: dict[str, asyncio.Future] = field(default_factory=dict)

    def tell(self, role: Role, message) -> None:
        self.dispatcher.on_message(self.members.peers[role], message)

    def token(
        self,
        role: Role,
        *token_ids: int,
        reason: FinishReason | None = None,
        name: str = "r",
        choice: int = 0,
    ) -> None:
        event = TokenEvent(name, token_ids, reason, choice_idx=choice)
        self.tell(role, Tokens((event,), LoadReport()))

    def fail(self, role: Role, error=None, item_idx=None) -> None:
        self.tell(role, Failed("r", to_info(error or UnavailableError(f"{role} gave up")), item_idx))

    def generate(self, request, items, hashes=()):
        return self.dispatcher.generate(request, items, hashes, Ledger(self.dispatcher._clock.now()))

    def units(self) -> dict[Role, float]:
        """Work that counts as sent and is not known to be done."""
        pools = (self.cluster.encoders, self.cluster.prefills, self.cluster.decodes)
        return {pool.role: float(pool.sent_units.sum()) for pool in pools}

    def sent(self, role: Role) -> list[str]:
        return [type(message).__name__ for message in self.members.connections[role].sent]

    async def start(self) -> tuple[asyncio.Task, list[int]]:
        got: list[int] = []

        async def read() -> FinishReason | None:
            (stream,) = self.generate(REQUEST, [ITEM], [b"block"])
            async for event in stream:
                got.extend(event.token_ids)
                if event.finish_reason is not None:
                    return event.finish_reason
            return None

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.tell(Role.PREFILL, Admitted("r"))
        await asyncio.sleep(0)
        return task, got


@pytest.fixture
async def door():
    calls: dict[str, asyncio.Future] = {}

    async def call_decode(replica_id: str, request_id: str) -> None:
        await calls.setdefault(request_id, asyncio.get_running_loop().create_future())

    timeouts = DoorArgs(first_token_timeout_s=0.2, request_timeout_s=0.4)
    clock = SystemClock()
    cluster = ClusterView(SchedulingPolicy(5.0, 2000.0, 0.3), 1.0, 2)
    queue = AdmissionQueue(AdmissionArgs(), 0.3, Capacity(0, 0, 0))
    dispatcher = Dispatcher(
        Placing(JointPolicy(), cluster, 16), Entrance(queue, clock), call_decode, timeouts, clock
    )
    door = Door(dispatcher, FakeMembers(), cluster, calls)
    door.dispatcher.members = door.members
    for peer in door.members.peers.values():
        door.dispatcher.on_joined(peer)
    yield door
    for call in calls.values():
        if not call.done():
            call.set_result(None)
    await asyncio.sleep(0.01)
    assert door.dispatcher.num_flights == 0
    for role, peer in door.members.peers.items():
        assert peer.num_flights == 0, role
        cancels = [m for m in door.members.connections[role].sent if m == Cancel("r")]
        assert len(cancels) <= 1, role
    assert not door.dispatcher._calls
    assert not any(door.units().values()) and queue.is_idle


def grant(lease_id: str) -> Grant:
    return Grant(lease_id, b"", 0, 8, "", (0,), (0,), 1.0)


async def test_decode_is_asked_once_prefill_has_the_memory_and_grants_are_passed_on(door):
    task, got = await door.start()
    assert [door.sent(role) for role in (Role.DECODE, Role.PREFILL, Role.ENCODE)] == [
        [StartDecode.__name__], [StartPrefill.__name__], [StartEncode.__name__]
    ]  # fmt: skip
    door.tell(Role.DECODE, DecodeGranted("r", grant("d")))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert door.members.connections[Role.PREFILL].sent[-1] == DecodeTarget("r", grant("d"))
    assert door.members.connections[Role.ENCODE].sent[-1] == EncodeTarget("r", 0, grant("p"))
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6)
    door.token(Role.DECODE, 7, reason=FinishReason.LENGTH)
    assert await task is FinishReason.LENGTH and got == [5, 6, 7]
    await asyncio.sleep(0.01)


async def test_decodes_tokens_that_overtake_the_first_one_wait_for_it(door):
    task, got = await door.start()
    door.token(Role.DECODE, 6)
    door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    await asyncio.sleep(0)
    assert got == []
    door.token(Role.PREFILL, 5)
    assert await task is FinishReason.STOP and got == [5, 6, 7]


async def test_work_is_predicted_until_it_is_known_to_be_done(door):
    task, _ = await door.start()
    assert door.units() == {Role.ENCODE: 3, Role.PREFILL: 6, Role.DECODE: 1}
    door.token(Role.PREFILL, 5)
    assert door.units()[Role.PREFILL] == 0 and door.units()[Role.DECODE] == 1
    door.tell(Role.ENCODE, Encoded("r", 0, cached=False))
    assert door.units()[Role.ENCODE] == 0
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    await task


@pytest.mark.parametrize("role", list(Role))
async def test_a_stage_that_fails_ends_the_request_and_frees_the_others(door, role):
    """The encoder is the only one of its pool."""
    task, _ = await door.start()
    door.fail(role, item_idx=0 if role is Role.ENCODE else None)
    with pytest.raises(UnavailableError, match=f"{role} gave up"):
        await task
    assert all(door.sent(other)[-1] == Cancel.__name__ for other in Role)


async def test_a_bad_item_is_named_by_its_place(door):
    task, _ = await door.start()
    door.fail(Role.ENCODE, MediaError("no picture"), item_idx=0)
    with pytest.raises(MediaError, match=r"item 0 \(image\): no picture"):
        await task


@pytest.mark.parametrize("how", ["fails", "is lost"])
@pytest.mark.parametrize(("role", "has_decode_spoken"), [(Role.ENCODE, False), (Role.PREFILL, True)])
async def test_a_stage_that_has_done_its_part_may_go(door, role, has_decode_spoken, how):
    task, got = await door.start()
    door.token(Role.PREFILL, 5)
    if has_decode_spoken:
        door.token(Role.DECODE, 6)
    door.fail(role) if how == "fails" else door.dispatcher.on_lost(door.members.peers[role])
    door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    assert await task is FinishReason.STOP and got[-1] == 7


@pytest.mark.parametrize("role", list(Role))
async def test_a_lost_worker_that_is_needed_ends_the_request_by_name(door, role):
    task, _ = await door.start()
    door.dispatcher.on_lost(door.members.peers[role])
    with pytest.raises(UnavailableError, match=f"the {role} worker was lost"):
        await task


async def test_grants_for_a_landed_flight_go_back_to_their_owner(door):
    task, _ = await door.start()
    task.cancel()
    await asyncio.wait([task])
    door.tell(Role.DECODE, DecodeGranted("r", grant("d")))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert door.members.connections[Role.DECODE].sent[-1] == ReturnGrant("d")
    assert door.members.connections[Role.PREFILL].sent[-1] == ReturnGrant("p")


async def test_an_item_that_prefill_has_for_another_request_is_called_off(door):
    task, got = await door.start()
    door.tell(Role.PREFILL, FeatureShared("r", 0))
    encoder = door.members.connections[Role.ENCODE]
    assert encoder.sent[-1] == Cancel("r", item_idx=0)
    assert door.units()[Role.ENCODE] == 0
    door.fail(Role.ENCODE, item_idx=0)  # said before it was called off
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert await task is FinishReason.STOP and got == [5, 6]
    assert encoder.sent[-1] == Cancel("r") and len(encoder.sent) == 3
    encoder.sent.clear()


async def test_a_shared_item_that_falls_through_is_encoded_after_all(door):
    task, _ = await door.start()
    encoder = door.members.connections[Role.ENCODE]
    (first,) = encoder.sent
    door.tell(Role.PREFILL, FeatureShared("r", 0))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert encoder.sent[2:] == [first, EncodeTarget("r", 0, grant("p"))]
    assert door.units()[Role.ENCODE] == 3
    door.fail(Role.ENCODE, item_idx=0)
    with pytest.raises(UnavailableError, match="encode gave up"):
        await task
    encoder.sent.clear()


async def test_a_flight_that_landed_is_not_told_of_sharing_but_gives_the_grant_back(door):
    task, _ = await door.start()
    task.cancel()
    await asyncio.wait([task])
    num_sent = len(door.sent(Role.ENCODE))
    door.tell(Role.PREFILL, FeatureShared("r", 0))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert len(door.sent(Role.ENCODE)) == num_sent
    assert door.members.connections[Role.PREFILL].sent[-1] == ReturnGrant("p")


async def test_a_refused_serve_call_ends_the_request(door):
    task, _ = await door.start()
    door.calls["r"].set_exception(RuntimeError("too many requests"))
    with pytest.raises(UnavailableError, match="refused the request: too many"):
        await task


async def test_silence_ends_the_request_at_its_deadline(door):
    task, _ = await door.start()
    with pytest.raises(UnavailableError, match="out of time"):
        await task


async def test_an_answer_that_the_first_token_ends_is_cancelled_everywhere(door):
    task, got = await door.start()
    door.token(Role.PREFILL, 5, reason=FinishReason.LENGTH)
    door.fail(Role.DECODE)  # prefill has given its lease up
    assert await task is FinishReason.LENGTH and got == [5]
    await asyncio.sleep(0.01)
    assert all(door.sent(role)[-1] == Cancel.__name__ for role in Role)


async def test_an_answer_that_decode_has_ended_is_cancelled_at_the_encoder_only(door):
    task, _ = await door.start()
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    await task
    await asyncio.sleep(0.01)
    assert [Cancel.__name__ in door.sent(role) for role in Role] == [True, False, False]


async def test_a_worker_that_cannot_be_sent_to_leaves_no_flight(door):
    def broken(message):
        raise UnavailableError("frame too long")

    door.members.connections[Role.PREFILL].send = lambda m: broken(m) if isinstance(m, StartPrefill) else None
    task, _ = await door.start()
    with pytest.raises(UnavailableError, match="too long"):
        await task


async def test_decode_is_not_asked_before_prefill_has_the_memory(door):
    (stream,) = door.generate(REQUEST, [ITEM], [])
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    assert door.sent(Role.DECODE) == [] and not door.calls
    assert door.sent(Role.PREFILL) == [StartPrefill.__name__]
    task.cancel()
    await asyncio.wait([task])


async def test_what_is_left_of_a_preempted_answer_flies_as_a_request_of_its_own(door):
    task, got = await door.start()
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6)
    await asyncio.sleep(0)
    door.tell(Role.DECODE, Preempted("r"))
    await asyncio.sleep(0.01)
    request = door.members.connections[Role.PREFILL].sent[-1].request
    assert request.prompt.token_ids == (*REQUEST.prompt.token_ids, 5, 6)
    assert request.prompt.media == REQUEST.prompt.media and request.stop.max_tokens == 1
    assert request.request_id != "r" and request.waited_s > 0
    assert door.sent(Role.ENCODE) == ["StartEncode", "Cancel", "StartEncode"]
    door.token(Role.PREFILL, 7, reason=FinishReason.LENGTH, name=request.request_id)
    assert await task is FinishReason.LENGTH and got == [5, 6, 7]
    door.members.connections[Role.PREFILL].sent.clear()  # each attempt is cancelled once
    door.members.connections[Role.DECODE].sent.clear()
    door.members.connections[Role.ENCODE].sent.clear()


async def test_a_preemption_that_overtakes_the_first_token_waits_for_it(door):
    task, got = await door.start()
    door.tell(Role.DECODE, Preempted("r"))
    await asyncio.sleep(0.01)
    assert door.sent(Role.PREFILL).count(StartPrefill.__name__) == 1
    door.token(Role.PREFILL, 5)
    await asyncio.sleep(0.01)
    request = door.members.connections[Role.PREFILL].sent[-1].request
    assert request.prompt.token_ids[-1] == 5
    door.token(Role.PREFILL, 6, reason=FinishReason.STOP, name=request.request_id)
    assert await task is FinishReason.STOP and got == [5, 6]
    for role in Role:
        door.members.connections[role].sent.clear()


async def test_choices_fly_together_and_land_when_the_last_is_closed(door):
    two = msgspec.structs.replace(REQUEST, sampling=(SamplingParams(), SamplingParams()))
    first, second = door.generate(two, [ITEM], [])
    reading = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    door.tell(Role.PREFILL, Admitted("r"))
    for choice in (0, 1):
        door.token(Role.PREFILL, 5 + choice, choice=choice)
    assert (await reading).token_ids == (5,) and (await anext(second)).token_ids == (6,)
    await first.aclose()
    assert door.members.connections[Role.DECODE].sent[-1] == Cancel("r", 0)
    assert door.dispatcher.num_flights == 1
    door.token(Role.DECODE, 8, reason=FinishReason.STOP, choice=1)
    assert (await anext(second)).token_ids == (8,)
    assert door.dispatcher.num_flights == 0
    door.members.connections[Role.DECODE].sent.clear()


async def test_a_request_that_no_worker_has_memory_for_is_refused_before_anything_is_sent(door):
    large = msgspec.structs.replace(REQUEST, stop=StopParams(16 * 8))
    (stream,) = door.generate(large, [ITEM], [])
    with pytest.raises(RequestError, match="144 tokens of KV cache; a decode worker holds 128"):
        await anext(stream)
    assert not any(door.sent(role) for role in Role)


async def test_an_encoder_is_told_the_class_of_a_request_and_how_long_it_has_waited(door):
    request = msgspec.structs.replace(REQUEST, priority=3, waited_s=1.5)
    launch = Launch(door.dispatcher, request, [ITEM], [b"block"], Ledger(0.0), "")
    flight = await launch.flight()
    (start,) = door.members.connections[Role.ENCODE].sent
    assert (start.priority, start.waited_s) == (3, 1.5)
    door.dispatcher.close(flight, 0)


@pytest.fixture
def staying(door):
    """A door whose text prompts are computed by decode."""
    door.dispatcher._placing._policy = StayingPolicy()
    return door


async def begin(door, request=TEXT):
    """Its streams, of which the first is being read."""
    streams = door.generate(request, (), [])
    task = asyncio.ensure_future(anext(streams[0]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return streams, task


async def test_a_prompt_that_decode_computes_concerns_nobody_else(staying):
    (first, second), task = await begin(staying)
    assert [staying.sent(role) for role in Role] == [[], [], ["StartDecode"]]
    assert staying.members.connections[Role.DECODE].sent[0].prefills and "r" in staying.calls
    assert staying.members.peers[Role.PREFILL].num_flights == 0
    for choice in (1, 0):
        staying.token(Role.DECODE, 5 + choice, choice=choice)
    assert (await task).token_ids == (5,) and (await anext(second)).token_ids == (6,)
    for choice in (0, 1):
        staying.token(Role.DECODE, 7, reason=FinishReason.STOP, choice=choice)
    assert (await anext(first)).token_ids == (await anext(second)).token_ids == (7,)
    assert staying.dispatcher.num_flights == 0
    assert [staying.sent(role) for role in Role] == [[], [], ["StartDecode"]]  # it is over there


async def test_a_request_with_media_takes_the_ordinary_way_still(staying):
    task, _ = await staying.start()
    assert not staying.members.connections[Role.DECODE].sent[0].prefills
    assert staying.sent(Role.PREFILL) == ["StartPrefill"]
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_only_the_loss_of_decode_ends_a_request_that_stays_there(staying, role):
    (_, second), task = await begin(staying)
    staying.dispatcher.on_lost(staying.members.peers[role])
    if role is Role.DECODE:
        with pytest.raises(UnavailableError, match="decode worker was lost"):
            await task
    else:
        staying.token(Role.DECODE, 5, reason=FinishReason.STOP)
        assert (await task).token_ids == (5,)
    await second.aclose()


async def test_a_request_that_stays_is_called_off_at_decode_alone(staying):
    streams, task = await begin(staying)
    await streams[1].aclose()
    assert staying.members.connections[Role.DECODE].sent[-1] == Cancel("r", 1)
    task.cancel()
    await asyncio.wait([task])
    assert [staying.sent(role) for role in Role] == [[], [], ["StartDecode", "Cancel", "Cancel"]]


async def test_silence_ends_a_request_that_stays_at_its_deadline(staying):
    (_, second), task = await begin(staying)
    with pytest.raises(UnavailableError, match="out of time"):
        await task
    await second.aclose()


async def test_what_is_left_of_a_preempted_answer_that_stayed_may_stay_again(staying):
    (first, second), task = await begin(staying)
    for choice in (0, 1):
        staying.token(Role.DECODE, 5 + choice, choice=choice)
    assert (await task).token_ids == (5,) and (await anext(second)).token_ids == (6,)
    staying.tell(Role.DECODE, Preempted("r"))
    reading = [asyncio.ensure_future(anext(stream)) for stream in (first, second)]
    await asyncio.sleep(0.01)
    starts = [m for m in staying.members.connections[Role.DECODE].sent if isinstance(m, StartDecode)]
    assert all(start.prefills for start in starts) and staying.sent(Role.PREFILL) == []
    assert [s.request.prompt.token_ids for s in starts] == [(1, 2, 3), (1, 2, 3, 5), (1, 2, 3, 6)]
    for start, token_id in zip(starts[1:], (7, 8), strict=True):
        staying.token(Role.DECODE, token_id, reason=FinishReason.STOP, name=start.request.request_id)
    assert [(await each).token_ids for each in reading] == [(7,), (8,)]
    staying.members.connections[Role.DECODE].sent.clear()
