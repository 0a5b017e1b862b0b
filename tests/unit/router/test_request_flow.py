"""The request flow between scripted workers: what they are sent, what the client gets, what is left."""

from __future__ import annotations

import msgspec
import pytest

from cluster.config.settings import AdmissionClassArgs
from cluster.errors import InternalError, MediaError, OverloadedError, RequestError, UnavailableError
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
    LoadReport,
    Measured,
    Preempted,
    PrefillAdmitted,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
    Tokens,
)  # fmt: skip
from cluster.types.request import SamplingParams, StopParams
from router.admission.controller import REPORT_EVERY_S
from router.telemetry.timeline import RequestTimeline
from tests.fakes.placement import EPD
from tests.fakes.scripted_flow import FIRST_TOKEN_S, ITEM, REQUEST, REQUEST_S, ScriptedFlow, grant


def test_decode_is_asked_once_prefill_has_the_memory_and_grants_are_passed_on(door):
    reader = door.start_media()
    assert [door.sent(role) for role in (Role.DECODE, Role.PREFILL, Role.ENCODE)] == [
        [StartDecode.__name__], [StartPrefill.__name__], [StartEncode.__name__]
    ]  # fmt: skip
    door.tell(Role.DECODE, DecodeGranted("r", grant("d")))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    told = door.messages[Role.PREFILL][-2:]
    assert told == [DecodeTarget("r", grant("d")), GrantPassed("p", ())]
    assert door.messages[Role.DECODE][-1] == GrantPassed("d", ())
    assert door.messages[Role.ENCODE][-1] == EncodeTarget("r", 0, grant("p"))
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6)
    door.token(Role.DECODE, 7, reason=FinishReason.LENGTH)
    assert reader.finish_reason is FinishReason.LENGTH and reader.token_ids == [5, 6, 7]


def test_decodes_tokens_that_overtake_the_first_one_wait_for_it(door):
    reader = door.start_media()
    door.token(Role.DECODE, 6)
    door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    assert reader.token_ids == []
    door.token(Role.PREFILL, 5)
    assert reader.finish_reason is FinishReason.STOP and reader.token_ids == [5, 6, 7]


def test_work_is_predicted_until_it_is_known_to_be_done(door):
    door.start_media()
    assert door.units() == {Role.ENCODE: 3, Role.PREFILL: 6, Role.DECODE: 1}
    door.token(Role.PREFILL, 5)
    assert door.units()[Role.PREFILL] == 0 and door.units()[Role.DECODE] == 1
    door.tell(Role.ENCODE, Encoded("r", 0, cached=False))
    assert door.units()[Role.ENCODE] == 0
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)


@pytest.mark.parametrize("role", EPD)
def test_a_stage_that_fails_ends_the_request_and_frees_the_others(door, role):
    reader = door.start_media()
    door.fail(role, InternalError("a bug"), item_idx=0 if role is Role.ENCODE else None)
    reader.check_error(InternalError, "a bug")
    assert all(door.sent(other)[-1] == Cancel.__name__ for other in EPD)
    assert door.flow.is_idle


def test_a_bad_item_is_named_by_its_place(door):
    reader = door.start_media()
    door.fail(Role.ENCODE, MediaError("no picture"), item_idx=0)
    reader.check_error(MediaError, r"item 0 \(image\): no picture")


@pytest.mark.parametrize("how", ["fails", "is lost"])
@pytest.mark.parametrize(("role", "has_decode_spoken"), [(Role.ENCODE, False), (Role.PREFILL, True)])
def test_a_stage_that_has_done_its_part_may_go(door, role, has_decode_spoken, how):
    reader = door.start_media()
    door.token(Role.PREFILL, 5)
    if has_decode_spoken:
        door.token(Role.DECODE, 6)
    door.fail(role) if how == "fails" else door.lose(role)
    door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    assert reader.finish_reason is FinishReason.STOP and reader.token_ids[-1] == 7


def test_grants_for_a_landed_request_go_back_to_their_owner(door):
    reader = door.start_media()
    door.close(reader)
    door.tell(Role.DECODE, DecodeGranted("r", grant("d")))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert door.messages[Role.DECODE][-1] == ReturnGrant("d")
    assert door.messages[Role.PREFILL][-1] == ReturnGrant("p")


def test_an_item_that_prefill_has_for_another_request_is_called_off(door):
    reader = door.start_media()
    door.tell(Role.PREFILL, FeatureShared("r", 0))
    encoder = door.messages[Role.ENCODE]
    assert encoder[-1] == Cancel("r", item_idx=0)
    assert door.units()[Role.ENCODE] == 0
    door.fail(Role.ENCODE, item_idx=0)  # said before it was called off
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert reader.finish_reason is FinishReason.STOP and reader.token_ids == [5, 6]
    assert encoder[-1] == Cancel("r") and len(encoder) == 3


def test_a_shared_item_that_falls_through_is_encoded_after_all(door):
    reader = door.start_media()
    encoder = door.messages[Role.ENCODE]
    (first,) = encoder
    door.tell(Role.PREFILL, FeatureShared("r", 0))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert encoder[2:] == [first, EncodeTarget("r", 0, grant("p"))]
    assert door.units()[Role.ENCODE] == 3
    door.fail(Role.ENCODE, InternalError("a bug"), item_idx=0)
    reader.check_error(InternalError, "a bug")


def test_a_request_that_landed_is_not_told_of_sharing_but_gives_the_grant_back(door):
    reader = door.start_media()
    door.close(reader)
    num_sent = len(door.sent(Role.ENCODE))
    door.tell(Role.PREFILL, FeatureShared("r", 0))
    door.tell(Role.PREFILL, FeatureGranted("r", 0, grant("p")))
    assert len(door.sent(Role.ENCODE)) == num_sent
    assert door.messages[Role.PREFILL][-1] == ReturnGrant("p")


def test_silence_ends_the_request_at_its_deadline(door):
    reader = door.start_media()
    door.wait(FIRST_TOKEN_S)
    reader.check_error(UnavailableError, "out of time")


def test_an_answer_that_the_first_token_ends_is_cancelled_everywhere(door):
    reader = door.start_media()
    door.token(Role.PREFILL, 5, reason=FinishReason.LENGTH)
    door.fail(Role.DECODE)  # prefill has given its lease up
    assert reader.finish_reason is FinishReason.LENGTH and reader.token_ids == [5]
    assert all(door.sent(role)[-1] == Cancel.__name__ for role in EPD)


def test_an_answer_that_decode_has_ended_is_cancelled_at_the_encoder_only(door):
    door.start_media()
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert [Cancel.__name__ in door.sent(role) for role in EPD] == [True, False, False]


def test_a_message_that_cannot_be_sent_ends_its_request_alone(door):
    (other,) = door.submit(msgspec.structs.replace(REQUEST, request_id="other"), [ITEM], [])
    door.cannot_send = lambda message: isinstance(message, StartPrefill)
    reader = door.start_media()
    reader.check_error(UnavailableError, "too long")
    assert not other.has_ended and "r" not in door.calls


def test_decode_is_not_asked_before_prefill_has_the_memory(door):
    door.submit(REQUEST, [ITEM])
    assert door.sent(Role.DECODE) == [] and not door.calls
    assert door.sent(Role.PREFILL) == [StartPrefill.__name__]


def test_what_is_left_of_a_preempted_answer_is_a_request_of_its_own(door):
    reader = door.start_media()
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6)
    door.wait(2.0)
    door.tell(Role.DECODE, Preempted("r"))
    request = door.messages[Role.PREFILL][-1].request
    assert request.prompt.token_ids == (*REQUEST.prompt.token_ids, 5, 6)
    assert request.prompt.media == REQUEST.prompt.media and request.stop.max_tokens == 1
    assert request.request_id != "r" and request.waited_s == 2.0
    assert door.sent(Role.ENCODE) == ["StartEncode", "Cancel", "StartEncode"]
    door.token(Role.PREFILL, 7, reason=FinishReason.LENGTH, name=request.request_id)
    assert reader.finish_reason is FinishReason.LENGTH and reader.token_ids == [5, 6, 7]


def test_a_preemption_that_overtakes_the_first_token_waits_for_it(door):
    reader = door.start_media()
    door.tell(Role.DECODE, Preempted("r"))
    assert door.sent(Role.PREFILL).count(StartPrefill.__name__) == 1
    door.token(Role.PREFILL, 5)
    request = door.messages[Role.PREFILL][-1].request
    assert request.prompt.token_ids[-1] == 5
    door.token(Role.PREFILL, 6, reason=FinishReason.STOP, name=request.request_id)
    assert reader.finish_reason is FinishReason.STOP and reader.token_ids == [5, 6]


def test_choices_run_together_and_land_when_the_last_is_closed(door):
    two = msgspec.structs.replace(REQUEST, sampling=(SamplingParams(), SamplingParams()))
    first, second = door.submit(two, [ITEM])
    door.tell(Role.PREFILL, PrefillAdmitted("r"))
    for choice in (0, 1):
        door.token(Role.PREFILL, 5 + choice, choice=choice)
    assert first.token_ids == [5] and second.token_ids == [6]
    door.close(first)
    assert door.messages[Role.DECODE][-1] == Cancel("r", 0)
    assert door.flow.num_running == 1
    door.token(Role.DECODE, 8, reason=FinishReason.STOP, choice=1)
    assert second.token_ids == [6, 8] and door.flow.num_running == 0


def test_a_request_that_no_worker_has_memory_for_is_refused_before_anything_is_sent(door):
    large = msgspec.structs.replace(REQUEST, stop=StopParams(16 * 8))
    (reader,) = door.submit(large, [ITEM])
    reader.check_error(RequestError, "144 tokens of KV cache; a decode worker holds 128")
    assert not any(door.sent(role) for role in EPD)


def test_an_encoder_is_told_the_class_of_a_request_and_how_long_it_has_waited(door):
    timeline = RequestTimeline(door.now - 1.5)  # its files have been fetched since then
    door.submit(msgspec.structs.replace(REQUEST, priority=3), [ITEM], [b"block"], timeline)
    (start,) = door.messages[Role.ENCODE]
    assert (start.priority, start.waited_s) == (3, 1.5)


def test_the_time_that_a_request_waited_for_admission_counts_at_workers():
    """Otherwise it would go behind all that came to the workers while it waited at the door."""
    door = ScriptedFlow(max_outstanding_s=1e-9)
    for name in ("first", "second", "third"):
        door.submit(msgspec.structs.replace(REQUEST, request_id=name), [ITEM])
    door.wait(3.0)
    door.token(Role.PREFILL, 5, name="first")
    waited = {
        m.request.request_id: m.request.waited_s
        for m in door.messages[Role.PREFILL]
        if isinstance(m, StartPrefill)
    }
    assert waited == {"first": 0.0, "second": 0.0, "third": 3.0}
    encode = door.messages[Role.ENCODE][-1]
    assert isinstance(encode, StartEncode) and encode.waited_s == 3.0
    door.wait(1.0)
    door.tell(Role.PREFILL, PrefillAdmitted("third"))
    door.fail(Role.PREFILL, name="third")
    again = door.messages[Role.PREFILL][-1]
    assert isinstance(again, StartPrefill) and again.request.waited_s == 4.0, "in a second attempt, too"
    door.audit()


def test_an_answer_that_is_not_read_holds_nothing_once_it_has_ended(door):
    """The flow delivers; a reader may come later for what its stream has kept."""
    reader = door.start_media()
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6)
    assert not door.flow.is_idle
    door.token(Role.DECODE, 7, reason=FinishReason.STOP)
    assert door.flow.is_idle and not any(door.units().values())
    assert reader.token_ids == [5, 6, 7]


def test_choices_of_a_refused_request_are_refused_alike(door):
    two = msgspec.structs.replace(
        REQUEST, sampling=(SamplingParams(), SamplingParams()), stop=StopParams(999)
    )
    for reader in door.submit(two, [ITEM]):
        reader.check_error(RequestError, "KV cache")
    assert not any(door.sent(role) for role in EPD)


def test_a_first_token_lets_the_next_request_go_to_prefill(door):
    door.tell(Role.PREFILL, Measured(ServiceCurves(prefill=Curve(0.0, 2.0))))
    for name in ("first", "second", "third"):
        door.submit(msgspec.structs.replace(REQUEST, request_id=name), [ITEM])
    assert [door.flow.num_running, door.flow.num_waiting] == [2, 1]
    door.token(Role.PREFILL, 5, name="first")
    assert door.flow.num_waiting == 0, "the first is with decode now"


def test_a_waiting_request_that_is_closed_is_never_started(door):
    door.tell(Role.PREFILL, Measured(ServiceCurves(prefill=Curve(10.0, 1e-4))))
    names = ("first", "second", "third")
    readers = [door.submit(msgspec.structs.replace(REQUEST, request_id=name), [ITEM])[0] for name in names]
    door.close(readers[2])
    assert door.flow.num_waiting == 0
    door.token(Role.PREFILL, 5, name="first")
    assert door.flow.num_running == 2


def test_a_waiting_request_is_refused_when_its_class_allows_no_more():
    door = ScriptedFlow(max_outstanding_s=1e-9, classes=(AdmissionClassArgs(name="all", max_wait_s=5.0),))
    names = ("first", "second", "third")
    readers = [door.submit(msgspec.structs.replace(REQUEST, request_id=name), [ITEM])[0] for name in names]
    assert door.flow.num_waiting == 1
    door.wait(4.999)
    assert not readers[2].has_ended
    door.wait(0.001)
    readers[2].check_error(OverloadedError, "busy")
    door.audit()


def test_reports_that_come_fast_are_taken_together_and_the_last_one_admits(door):
    """Other doors' requests leave the decode worker."""
    first, second = (msgspec.structs.replace(REQUEST, request_id=name) for name in ("first", "second"))
    full, empty = (Tokens((), LoadReport(num_used_blocks=number)) for number in (8, 0))
    door.submit(first, [ITEM])
    door.tell(Role.DECODE, full)
    door.submit(second, [ITEM])
    door.tell(Role.DECODE, full)
    assert door.flow.num_waiting == 1
    door.wait(0.4 * REPORT_EVERY_S)
    door.tell(Role.DECODE, empty)
    assert door.flow.num_waiting == 1
    door.wait(0.6 * REPORT_EVERY_S)
    assert door.flow.num_waiting == 0


def test_the_first_token_has_a_deadline_of_its_own(door):
    reader = door.start_media()
    door.wait(FIRST_TOKEN_S - 0.001)
    assert not reader.has_ended
    door.wait(0.001)
    reader.check_error(UnavailableError, "out of time")
    assert door.flow.is_idle


def test_an_answer_that_has_begun_may_take_longer_than_a_first_token(door):
    reader = door.start_media()
    door.token(Role.PREFILL, 5)
    door.wait(REQUEST_S - 0.001)
    door.token(Role.DECODE, 6)
    assert not reader.has_ended
    door.wait(0.001)
    reader.check_error(UnavailableError, "out of time")
    assert reader.token_ids == [5, 6]


def test_each_choice_has_its_own_first_token(door):
    """One choice that has begun goes on when the other ends at the deadline."""
    two = msgspec.structs.replace(REQUEST, sampling=(SamplingParams(), SamplingParams()))
    first, second = door.submit(two, [ITEM])
    door.token(Role.PREFILL, 5)
    door.wait(FIRST_TOKEN_S)
    second.check_error(UnavailableError, "out of time")
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert first.token_ids == [5, 6] and first.finish_reason is FinishReason.STOP


def test_a_drained_worker_is_let_go_with_its_last_request(door):
    reader = door.start_media()
    door.run(door.flow.on_listed, "decode", False)
    assert door.drained == []
    door.token(Role.PREFILL, 5)
    door.token(Role.DECODE, 6, reason=FinishReason.STOP)
    assert reader.token_ids == [5, 6] and door.drained == ["decode"]
