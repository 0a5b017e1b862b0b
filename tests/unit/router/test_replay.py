"""Requests whose worker is lost, stopped or gives them up go on elsewhere: what the next workers are sent, and
what the reader gets."""

from __future__ import annotations

import msgspec
import pytest

from cluster.errors import QuarantinedError, UnavailableError, to_info
from cluster.types.members import Role
from cluster.types.messages import (
    Cancel,
    Failed,
    FinishReason,
    Measured,
    Pong,
    Preempted,
    PrefillAdmitted,
    StartDecode,
    StartPrefill,
)
from cluster.types.request import Guidance, Prompt, SamplingParams, StopParams
from router.flow.continuation import MAX_REPLAYS, MAX_UNPLACED
from tests.fakes.placement import EPD, curves_of
from tests.fakes.scripted_flow import FIRST_TOKEN_S, ITEM, REQUEST, REQUEST_S, Reader, ScriptedFlow

TWO = msgspec.structs.replace(
    REQUEST, sampling=(SamplingParams(), SamplingParams(seed=1)), stop=StopParams(9)
)


@pytest.fixture
def door():
    door = ScriptedFlow()
    yield door
    door.audit()


def started(door: ScriptedFlow, name: str) -> StartPrefill | StartDecode:
    """The last request that the worker was asked to compute."""
    return [m for m in door.messages[name] if isinstance(m, StartPrefill | StartDecode)][-1]


def say(door: ScriptedFlow, name: str, *token_ids: int, reason: FinishReason | None = None, choice: int = 0):
    """The worker has tokens of the request that it was last asked for."""
    door.token(name, *token_ids, reason=reason, name=started(door, name).request.request_id, choice=choice)


@pytest.mark.parametrize("role", EPD)
def test_a_request_whose_only_worker_was_lost_waits_for_another(door, role):
    reader = door.start_media()
    door.lose(role)
    assert not reader.has_ended and len(door.flow.continuation.unplaced) == 1
    assert door.flow.num_running == 0, "nothing is held for it meanwhile"
    door.wait(FIRST_TOKEN_S / 2)
    door.join(role, f"{role}-2")
    prefill = "prefill-2" if role is Role.PREFILL else "prefill"
    request = started(door, prefill).request
    assert request.prompt == REQUEST.prompt and request.waited_s == FIRST_TOKEN_S / 2
    say(door, prefill, 5, reason=FinishReason.STOP)
    assert reader.token_ids == [5] and reader.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("role", EPD)
def test_waiting_for_a_worker_ends_with_the_first_tokens_deadline(door, role, has_begun):
    if has_begun:
        reader = door.start_media()
        door.lose(role)
    else:
        door.lose(role)
        (reader,) = door.submit(REQUEST, [ITEM], [b"block"])
    door.wait(FIRST_TOKEN_S - 0.1)
    assert not reader.has_ended
    door.wait(0.1)
    reader.check_error(UnavailableError, f"no {role} worker is ready")
    assert door.flow.is_idle


def test_a_request_that_waits_for_a_worker_has_its_time_from_when_it_begins(door):
    door.lose(Role.DECODE)
    (reader,) = door.submit(REQUEST, [ITEM], [b"block"])
    door.wait(FIRST_TOKEN_S - 1)
    door.join(Role.DECODE, "decode-2")
    door.wait(2.0)  # the first deadline passes
    assert not reader.has_ended
    door.wait(FIRST_TOKEN_S)
    reader.check_error(UnavailableError, "out of time")


def test_a_request_that_leaves_while_it_waits_for_a_worker_is_forgotten(door):
    door.lose(Role.DECODE)
    (reader,) = door.submit(REQUEST, [ITEM], [b"block"])
    door.close(reader)
    assert door.flow.is_idle and len(door.flow.continuation.unplaced) == 0
    door.join(Role.DECODE, "decode-2")
    assert door.sent(Role.PREFILL) == []


def test_a_choice_that_was_closed_while_its_request_waited_for_a_worker_is_not_read_there(door):
    left, read = door.submit(TWO, [ITEM], [b"block"])
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    door.lose(Role.PREFILL)
    door.close(left)
    door.join(Role.PREFILL, "prefill-2")
    assert Cancel("r.1", 0) in door.messages[Role.DECODE]
    door.tell("prefill-2", PrefillAdmitted("r.1"))
    say(door, "prefill-2", 5, choice=1)
    say(door, Role.DECODE, 6, reason=FinishReason.STOP, choice=1)
    assert read.finish_reason is FinishReason.STOP and not left.token_ids
    assert door.flow.is_idle, "nothing goes on for the choice that is not read"
    door.wait(2 * REQUEST_S)  # the deadlines pass, and the timer's call returns


def test_so_many_requests_wait_for_a_worker_and_no_more(door):
    door.lose(Role.DECODE)
    readers = [
        door.submit(msgspec.structs.replace(REQUEST, request_id=f"r{i}"), [ITEM], [b"block"])[0]
        for i in range(MAX_UNPLACED + 1)
    ]
    readers[-1].check_error(UnavailableError, "no decode worker is ready")
    assert not any(reader.has_ended for reader in readers[:-1])


def test_an_answer_goes_on_where_its_decode_worker_was_lost(door):
    """The next decode worker gets the prompt with the tokens that the reader has; those that had overtaken
    the first one, or were drawn and never came, are drawn again."""
    door.join(Role.DECODE, "decode-2")
    first, second = door.submit(TWO, [ITEM], [b"block"])
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    lost = door.attempt().decode.replica_id
    door.token(Role.PREFILL, 5)
    say(door, lost, 6, 7)
    say(door, lost, 8, choice=1)  # before the first token of this choice
    door.lose(lost)
    assert first.token_ids == [5, 6, 7] and second.token_ids == []
    fresh, rest = [m.request for m in door.messages[Role.PREFILL] if isinstance(m, StartPrefill)][1:]
    assert fresh.prompt == TWO.prompt and fresh.sampling == TWO.sampling[1:] and fresh.stop == TWO.stop
    assert rest.prompt.token_ids == (*TWO.prompt.token_ids, 5, 6, 7) and rest.prompt.num_generated == 3
    assert rest.sampling == TWO.sampling[:1] and rest.stop.max_tokens == 6
    door.token(Role.PREFILL, 9, reason=FinishReason.STOP, name=rest.request_id)
    door.token(Role.PREFILL, 4, reason=FinishReason.STOP, name=fresh.request_id)
    assert first.token_ids == [5, 6, 7, 9] and second.token_ids == [4]
    assert first.has_ended and second.has_ended and door.flow.continuation.num_replays == 1


def test_choices_without_a_token_share_their_prompt_again(door):
    door.submit(TWO, [ITEM], [b"block"])
    door.lose(Role.PREFILL)
    door.join(Role.PREFILL, "prefill-2")
    (start,) = [m for m in door.messages["prefill-2"] if isinstance(m, StartPrefill)]
    assert start.request.sampling == TWO.sampling and start.request.prompt == TWO.prompt


def test_a_choice_that_has_ended_is_not_replayed(door):
    first, second = door.submit(TWO, [ITEM], [b"block"])
    door.token(Role.PREFILL, 5, reason=FinishReason.STOP)
    door.token(Role.PREFILL, 6, choice=1)
    door.lose(Role.DECODE)
    door.join(Role.DECODE, "decode-2")
    assert first.token_ids == [5]
    assert started(door, "prefill").request.prompt.token_ids[-1] == 6
    say(door, "prefill", 7, reason=FinishReason.STOP)
    assert second.token_ids == [6, 7]


def test_a_guided_answer_goes_on_with_both_prompts(door):
    guided = msgspec.structs.replace(REQUEST, guidance=Guidance(2.0, Prompt((8, 9))))
    door.submit(guided, [ITEM], [b"block"])
    door.token(Role.PREFILL, 5)
    door.lose(Role.DECODE)
    door.join(Role.DECODE, "decode-2")
    request = started(door, "prefill").request
    assert [prompt.token_ids[-1] for prompt in request.prompts] == [5, 5]


def test_an_answer_survives_one_worker_after_another(door):
    reader, tokens = door.start_media(), [5]
    door.token(Role.PREFILL, 5)
    for i in range(2, 4):
        door.lose("decode" if i == 2 else f"decode-{i - 1}")
        door.join(Role.DECODE, f"decode-{i}")
        # more than a frame or two, or the prompt counts as the cause
        more = list(range(10 * i, 10 * i + 9))
        say(door, "prefill", *more)
        tokens += more
        assert not reader.has_ended
    assert reader.token_ids == tokens


@pytest.mark.parametrize("is_over_at_decode", [False, True])
def test_prefill_that_is_lost_before_its_first_token_came(door, is_over_at_decode):
    """Decode has the KV and goes on, but only prefill could have said how the answer begins."""
    reader = door.start_media()
    door.token(Role.DECODE, 6)
    if is_over_at_decode:
        door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    door.lose(Role.PREFILL)
    assert door.flow.num_running == 0 and reader.token_ids == []
    door.join(Role.PREFILL, "prefill-2")
    say(door, "prefill-2", 5, reason=FinishReason.STOP)
    assert reader.token_ids == [5]


def test_a_preempted_choice_is_not_replayed_with_its_first_attempt(door):
    """Decode preempts two choices when prefill has said how one of them begins; then prefill is lost."""
    first, second = door.submit(TWO, [ITEM])
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    door.join(Role.PREFILL, "prefill-2")
    door.run(door.flow.on_listed, "prefill", False)
    door.token(Role.PREFILL, 5)
    door.tell(Role.DECODE, Preempted("r"))
    assert started(door, "prefill-2").request.prompt.token_ids[-1] == 5
    say(door, "prefill-2", 9, reason=FinishReason.STOP)
    door.lose("prefill")
    assert started(door, "prefill-2").request.sampling == TWO.sampling[1:]
    say(door, "prefill-2", 7, reason=FinishReason.STOP)
    assert first.token_ids == [5, 9] and second.token_ids == [7]


@pytest.mark.parametrize("role", EPD)
def test_what_a_worker_gives_up_is_tried_again_but_not_for_ever(door, role):
    reader = door.start_media()
    for i in range(MAX_REPLAYS + 1):
        assert not reader.has_ended
        name = f"r.{i}" if i else "r"
        door.fail(role, item_idx=0 if role is Role.ENCODE else None, name=name)
    reader.check_error(UnavailableError, f"{role} gave up")
    assert door.flow.is_idle


def begin_apart(door: ScriptedFlow, num_choices: int) -> list[Reader]:
    """Each choice has tokens of its own, and so its next attempt, too."""
    sampling = tuple(SamplingParams(seed=idx) for idx in range(num_choices))
    request = msgspec.structs.replace(REQUEST, sampling=sampling, stop=StopParams(9))
    readers = door.submit(request, [ITEM], [b"block"])
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    for idx in range(num_choices):
        door.token(Role.PREFILL, idx, choice=idx)
    return readers


@pytest.mark.parametrize("num_choices", [1, 3])
def test_how_often_a_choice_may_be_lost_does_not_depend_on_how_many_there_are(door, num_choices):
    """The end of a connection interrupts them all, each in an attempt of its own (seed 63798)."""
    readers = begin_apart(door, num_choices)
    for _ in range(MAX_REPLAYS):
        door.lose(Role.DECODE)
        door.join(Role.DECODE)
        assert not any(reader.has_ended for reader in readers)
        assert door.flow.num_running == num_choices
    door.lose(Role.DECODE)
    for reader in readers:
        reader.check_error(UnavailableError, "decode worker was lost")


def test_a_choice_that_is_lost_alone_costs_the_others_nothing(door):
    """Their workers give them up one by one."""
    readers = begin_apart(door, 3)
    door.lose(Role.DECODE)
    door.join(Role.DECODE)
    first, *others = door.flow.attempts
    for _ in range(MAX_REPLAYS):
        door.fail(Role.PREFILL, name=first)
        first = started(door, "prefill").request.request_id
    for name in others:
        door.fail(Role.PREFILL, name=name)
    assert [reader.has_ended for reader in readers] == [True, False, False]


def test_all_choices_leave_a_worker_that_is_stopped(door):
    """Each in an attempt of its own."""
    begin_apart(door, 4)
    door.lose(Role.DECODE)
    door.join(Role.DECODE)
    door.join(Role.DECODE, "decode-2")
    for _ in range(20):
        door.wait(0.1)
        for moving in ("prefill", "encode", "decode-2"):
            door.tell(moving, Pong())
    assert door.num_requests("decode-2") == 4 and door.num_requests(Role.DECODE) == 0


def test_a_call_that_serve_refuses_goes_to_another_decode_worker(door):
    reader = door.start_media()
    door.join(Role.DECODE, "decode-2")
    door.run(door.flow.on_call_failed, "r", RuntimeError("too many requests"))
    assert not reader.has_ended and door.attempt("r.1").decode.replica_id == "decode-2"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_that_failed_is_avoided_where_there_is_another(door, role):
    door.join(Role.PREFILL, "prefill-2")
    door.join(Role.DECODE, "decode-2")
    door.submit(REQUEST, [ITEM], [b"block"])
    failed = door.attempt().prompt_worker.replica_id, door.attempt().decode.replica_id
    door.tell(failed[role is Role.DECODE], Failed("r", to_info(UnavailableError("the peer is gone"))))
    again = door.attempt("r.1")
    assert not {again.prompt_worker.replica_id, again.decode.replica_id} & set(failed)


def test_a_prompt_that_ends_one_worker_after_another_is_refused(door):
    reader = door.start_media()
    door.lose(Role.PREFILL)
    door.join(Role.PREFILL, "prefill-2")
    door.tell("prefill-2", PrefillAdmitted("r.1"))
    assert not reader.has_ended
    door.lose("prefill-2")
    reader.check_error(QuarantinedError, "this prompt were lost")


def test_a_prompt_that_only_waited_at_lost_workers_is_not_refused(door):
    (reader,) = door.submit(REQUEST, [ITEM], [b"block"])
    for i in range(2, 5):
        door.lose("prefill" if i == 2 else f"prefill-{i - 1}")
        door.join(Role.PREFILL, f"prefill-{i}")
    say(door, "prefill-4", 5, reason=FinishReason.STOP)
    assert reader.token_ids == [5] and len(door.flow.quarantine) == 0


def test_the_requests_of_a_worker_that_is_stopped_move_within_two_seconds(door):
    """What it sends when it continues is about attempts that have landed."""
    door.join(Role.DECODE, "decode-2")
    reader = door.start_media()
    stopped = door.attempt().decode.replica_id
    other = "decode" if stopped == "decode-2" else "decode-2"
    door.token(Role.PREFILL, 5)
    say(door, stopped, 6)
    for _ in range(20):
        door.wait(0.1)
        for moving in ("prefill", "encode", other):
            door.tell(moving, Pong())
    attempt = door.attempt("r.1")
    assert attempt.decode.replica_id == other and attempt.request.prompt.token_ids[-2:] == (5, 6)
    assert door.sent(stopped)[-1] == "Cancel"
    door.token(stopped, 7, reason=FinishReason.STOP)
    assert reader.token_ids == [5, 6] and not reader.has_ended


def test_the_requests_of_the_only_prefill_worker_move_to_decode_when_it_is_stopped(door):
    door.tell(Role.DECODE, Measured(curves_of(Role.DECODE, may_prefill=True)))
    reader = door.start_media()
    assert door.attempt().prompt_worker.replica_id == "prefill"
    for _ in range(20):
        door.wait(0.1)
        for moving in ("decode", "encode"):
            door.tell(moving, Pong())
    asked = started(door, "decode")
    assert door.attempt("r.1").is_local and isinstance(asked, StartDecode) and asked.prefills
    say(door, "decode", 5, reason=FinishReason.STOP)
    assert reader.token_ids == [5]


def test_the_requests_of_a_stopped_worker_stay_where_no_other_could_take_them(door):
    reader = door.start_media()
    door.token(Role.PREFILL, 5)
    door.wait(FIRST_TOKEN_S / 2)
    assert door.flow.num_running == 1 and "r" in door.flow.attempts
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert reader.token_ids == [5, 6]
