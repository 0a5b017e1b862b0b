"""The dispatcher against scripted workers: what it sends, what the client gets, what is left."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from cluster.config.settings import DoorArgs
from cluster.errors import MediaError, OverloadedError, RequestError, UnavailableError
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.members import Role
from cluster.types.messages import (
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Encoded,
    EncodeTarget,
    FeatureGranted,
    FeatureShared,
    FinishReason,
    GrantPassed,
    Measured,
    Preempted,
    PrefillAdmitted,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
)  # fmt: skip
from cluster.types.request import SamplingParams, StopParams
from cluster.types.transfer import Grant
from router.streams import Launch
from router.telemetry.timeline import RequestTimeline
from tests.unit.router.scripted_door import ITEM, REQUEST


def grant(lease_id: str) -> Grant:
    return Grant(lease_id, b"", 0, 8, "", (0,), (0,), 1.0)


async def test_decode_is_asked_once_prefill_has_the_memory_and_grants_are_passed_on(door):
    task, got = await door.start()
    assert [door.sent(role) for role in (Role.DECODE, Role.PREFILL, Role.ENCODE)] == [
        [StartDecode.__name__], [StartPrefill.__name__], [StartEncode.__name__]
    ]  # fmt: skip
    door.tell(Role.DECODE, DecodeGranted("r", grant("d")))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    told = door.members.connections[Role.PREFILL].sent[-2:]
    assert told == [DecodeTarget("r", grant("d")), GrantPassed("p", ())]
    assert door.members.connections[Role.DECODE].sent[-1] == GrantPassed("d", ())
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
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
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
    launch = Launch(door.dispatcher, request, [ITEM], [b"block"], RequestTimeline(0.0), "")
    flight = await launch.flight()
    (start,) = door.members.connections[Role.ENCODE].sent
    assert (start.priority, start.waited_s) == (3, 1.5)
    door.dispatcher.close(flight, 0)


@pytest.mark.parametrize("is_over_at_decode", [False, True])
async def test_prefill_that_is_lost_before_its_first_token_came_ends_the_request_at_once(
    door, is_over_at_decode
):
    """Decode has the KV and goes on, but nothing will ever say how the answer begins."""
    task, got = await door.start()
    door.token(Role.DECODE, 6)
    if is_over_at_decode:
        door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    door.dispatcher.on_lost(door.members.peers[Role.PREFILL])
    assert door.dispatcher.num_flights == 0
    with pytest.raises(UnavailableError, match="the prefill worker was lost"):
        await task
    assert got == []


async def test_an_answer_that_nobody_reads_holds_nothing_once_it_has_ended(door):
    (stream,) = door.generate(REQUEST, [ITEM], [b"block"])
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    door.token(Role.PREFILL, 5)
    assert (await reading).token_ids == (5,)
    door.token(Role.DECODE, 6)
    assert not door.dispatcher.is_idle
    door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    assert door.dispatcher.is_idle and not any(door.units().values())
    assert [event.token_ids async for event in stream] == [(6,), (7,)]


async def test_choices_of_a_refused_request_are_refused_alike(door, monkeypatch):
    def refuse(ticket):
        raise OverloadedError("busy")

    monkeypatch.setattr(door.dispatcher._entrance, "enter", refuse)
    two = msgspec.structs.replace(REQUEST, sampling=(SamplingParams(), SamplingParams()))
    for stream in door.generate(two, [ITEM], []):
        with pytest.raises(OverloadedError):
            await asyncio.wait_for(anext(stream), 1)
    assert not any(door.sent(role) for role in Role), "the second was not let in either"


async def test_a_failed_request_is_let_go_before_its_error_is_read(door):
    (stream,) = door.generate(REQUEST, [ITEM], [b"block"])
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    door.token(Role.PREFILL, 5)
    await reading
    door.fail(Role.DECODE)
    assert door.dispatcher.is_idle
    with pytest.raises(UnavailableError, match="decode gave up"):
        await anext(stream)


async def test_a_first_token_lets_the_next_request_go_to_prefill(door):
    door.tell(Role.PREFILL, Measured(ServiceCurves(prefill=Curve(10.0, 1e-4))))
    tasks = []
    for name in ("first", "second", "third"):
        (stream,) = door.generate(msgspec.structs.replace(REQUEST, request_id=name), [ITEM], [])
        tasks.append(asyncio.ensure_future(anext(stream)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [door.dispatcher.num_flights, door.dispatcher.num_waiting] == [2, 1]
    door.token(Role.PREFILL, 5, name="first")
    assert door.dispatcher.num_waiting == 0, "the first is with decode now"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for flight in list(door.dispatcher._flights.values()):
        door.dispatcher.close(flight, 0)


async def test_the_first_token_has_a_deadline_of_its_own(door):
    door.dispatcher._timeouts = DoorArgs(first_token_timeout_s=0.05, request_timeout_s=3600.0)
    task, _ = await door.start()
    with pytest.raises(UnavailableError, match="out of time"):
        await asyncio.wait_for(task, 60)


async def test_an_answer_that_has_begun_may_take_longer_than_a_first_token(door):
    door.dispatcher._timeouts = DoorArgs(first_token_timeout_s=100.0, request_timeout_s=3600.0)
    (stream,) = door.generate(REQUEST, [ITEM], [])
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    door.token(Role.PREFILL, 5)
    assert (await reading).token_ids == (5,)
    stream._started_at -= 200.0
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert (await reading).token_ids == (6,)
