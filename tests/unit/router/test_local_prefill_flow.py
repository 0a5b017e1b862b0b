"""The request flow where decode computes prompts itself: no other worker hears of such a request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.errors import UnavailableError
from cluster.kvcache.hashing import block_hashes
from cluster.types.media import PlacedMedia
from cluster.types.members import Role
from cluster.types.messages import (
    BlocksChanged,
    Cancel,
    FeatureGranted,
    FinishReason,
    Measured,
    Preempted,
    StartDecode,
)
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from tests.fakes.local_prefill import LocalPrefillPolicy
from tests.fakes.placement import EPD, curves_of
from tests.fakes.scripted_flow import FIRST_TOKEN_S, ITEM, ScriptedFlow, grant

TEXT = GenerateRequest("r", Prompt((1, 2, 3)), (SamplingParams(), SamplingParams()), StopParams(3))
IMAGE = PlacedMedia(ITEM.modality, ITEM.media_hash, ((2, 3),), ITEM.geometry)
TURN = GenerateRequest(
    "r", Prompt((1, 2, 9, 9, 9, *range(40)), (IMAGE,)), (SamplingParams(), SamplingParams()), StopParams(3)
)
HASHES = block_hashes(TURN.prompt, 16)


@pytest.fixture
def dialogue() -> Iterator[ScriptedFlow]:
    """Decode has the KV of a prompt with an image."""
    door = ScriptedFlow()
    door.tell(Role.DECODE, Measured(curves_of(Role.DECODE, may_prefill=True)))
    door.tell(Role.DECODE, BlocksChanged(tuple(HASHES), ()))
    yield door
    door.audit()


@pytest.fixture
def door() -> Iterator[ScriptedFlow]:
    """Text prompts are computed by decode."""
    door = ScriptedFlow(LocalPrefillPolicy())
    yield door
    door.audit()


def test_a_prompt_that_decode_computes_concerns_no_other_worker(door):
    first, second = door.submit(TEXT)
    assert [door.sent(role) for role in EPD] == [[], [], ["StartDecode"]]
    assert door.messages[Role.DECODE][0].prefills and door.calls == ["r"]
    assert door.num_requests("prefill") == 0
    for choice in (1, 0):
        door.token(Role.DECODE, 5 + choice, choice=choice)
    assert first.token_ids == [5] and second.token_ids == [6]
    for choice in (0, 1):
        door.token(Role.DECODE, 7, reason=FinishReason.STOP, choice=choice)
    assert first.token_ids == [5, 7] and second.token_ids == [6, 7]
    assert door.flow.num_running == 0
    assert [door.sent(role) for role in EPD] == [[], [], ["StartDecode"]]  # decode has ended it


def test_a_request_with_media_takes_the_ordinary_way_still(door):
    door.start_media()
    assert not door.messages[Role.DECODE][0].prefills
    assert door.sent(Role.PREFILL) == ["StartPrefill"]


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_only_the_loss_of_decode_concerns_a_locally_prefilled_request(door, role):
    first, _ = door.submit(TEXT)
    door.lose(role)
    if role is Role.DECODE:
        assert len(door.flow.continuation.unplaced) == 1
    else:
        door.token(Role.DECODE, 5, reason=FinishReason.STOP)
        assert first.token_ids == [5] and first.has_ended


def test_a_locally_prefilled_request_is_cancelled_at_decode_alone(door):
    first, second = door.submit(TEXT)
    door.close(second)
    assert door.messages[Role.DECODE][-1] == Cancel("r", 1)
    door.close(first)
    assert [door.sent(role) for role in EPD] == [[], [], ["StartDecode", "Cancel", "Cancel"]]


def test_silence_ends_a_locally_prefilled_request_at_its_deadline(door):
    readers = door.submit(TEXT)
    door.wait(FIRST_TOKEN_S)
    for reader in readers:
        reader.check_error(UnavailableError, "out of time")


def test_what_is_left_of_a_preempted_answer_may_be_prefilled_locally_again(door):
    first, second = door.submit(TEXT)
    for choice in (0, 1):
        door.token(Role.DECODE, 5 + choice, choice=choice)
    door.tell(Role.DECODE, Preempted("r"))
    starts = [message for message in door.messages[Role.DECODE] if isinstance(message, StartDecode)]
    assert all(start.prefills for start in starts) and door.sent(Role.PREFILL) == []
    assert [s.request.prompt.token_ids for s in starts] == [(1, 2, 3), (1, 2, 3, 5), (1, 2, 3, 6)]
    for start, token_id in zip(starts[1:], (7, 8), strict=True):
        door.token(Role.DECODE, token_id, reason=FinishReason.STOP, name=start.request.request_id)
    assert first.token_ids == [5, 7] and second.token_ids == [6, 8]


def test_a_turn_whose_images_decode_has_concerns_no_other_worker(dialogue):
    first, second = dialogue.submit(TURN, [ITEM], HASHES)
    assert [dialogue.sent(role) for role in EPD] == [[], [], ["StartDecode"]]
    (start,) = dialogue.messages[Role.DECODE]
    assert start.prefills and start.cached == (0,) and start.codec == "raw"
    for choice in (0, 1):
        dialogue.token(Role.DECODE, 5, reason=FinishReason.STOP, choice=choice)
    assert first.token_ids == second.token_ids == [5]
    assert dialogue.sent(Role.PREFILL) == [] and dialogue.sent(Role.DECODE) == ["StartDecode"]


def test_a_turn_whose_images_decode_has_lost_is_encoded_for_it(dialogue):
    first, second = dialogue.submit(TURN, [ITEM], HASHES)
    dialogue.tell(Role.DECODE, FeatureGranted("r", 0, grant("lease")))
    assert [dialogue.sent(role) for role in EPD] == [
        ["StartEncode", "EncodeTarget"],
        [],
        ["StartDecode", "GrantPassed"],
    ]
    for choice in (0, 1):
        dialogue.token(Role.DECODE, 5, reason=FinishReason.STOP, choice=choice)
    assert first.token_ids == second.token_ids == [5]
