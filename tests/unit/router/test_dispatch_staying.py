"""The dispatcher where decode computes text prompts itself: nobody else hears of such a request."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import UnavailableError
from cluster.types.members import Role
from cluster.types.messages import Cancel, FinishReason, Preempted, StartDecode
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from tests.fakes.local_prefill import LocalPrefillPolicy

TEXT = GenerateRequest("r", Prompt((1, 2, 3)), (SamplingParams(), SamplingParams()), StopParams(3))


@pytest.fixture
def staying(door):
    """A door whose text prompts are computed by decode."""
    door.dispatcher._placing._policy = LocalPrefillPolicy()
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
