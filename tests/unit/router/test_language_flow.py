"""The request flow where one worker computes the prompt and generates the answer: media and all."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
import pytest

from cluster.errors import MediaError, QuarantinedError, UnavailableError
from cluster.types.members import Role
from cluster.types.messages import (
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Encoded,
    EncoderLost,
    EncodeTarget,
    FeatureGranted,
    FeatureShared,
    FinishReason,
    GrantPassed,
    LoadReport,
    Pong,
    Preempted,
    PrefillAdmitted,
    ReturnGrant,
    Stalled,
    StartDecode,
    StartPrefill,
    TokenEvent,
    Tokens,
)
from cluster.types.request import Guidance, Prompt, SamplingParams
from cluster.types.timings import PrefillTiming
from router.flow.watch import LOOK_EVERY_S, MOVE_S
from router.policy import ClusterView, Decision, ItemView, JointPolicy, Placement, RequestView
from router.policy.estimate import Estimate
from router.telemetry.timeline import RequestTimeline
from tests.fakes.scripted_flow import FIRST_TOKEN_S, ITEM, REQUEST, Reader, ScriptedFlow, grant

GUIDED = msgspec.structs.replace(
    REQUEST, sampling=(SamplingParams(), SamplingParams()), guidance=Guidance(2.0, Prompt((1, 2)))
)


@pytest.fixture
def door() -> Iterator[ScriptedFlow]:
    """One encoder, one worker for everything else."""
    door = ScriptedFlow(roles=(Role.ENCODE, Role.LANGUAGE))
    yield door
    door.audit()


def start(door: ScriptedFlow) -> Reader:
    (reader,) = door.submit(REQUEST, [ITEM], [b"block"])
    return reader


def starts(door: ScriptedFlow) -> list[StartDecode]:
    return [message for message in door.messages["language"] if isinstance(message, StartDecode)]


def test_a_prompt_with_media_concerns_its_encoder_and_one_other_worker(door):
    timeline = RequestTimeline(door.now)
    (reader,) = door.submit(REQUEST, [ITEM], [b"block"], timeline)
    assert (door.sent("language"), door.sent("encode")) == (["StartDecode"], ["StartEncode"])
    assert starts(door)[0].prefills and door.calls == ["r"]
    door.tell("language", FeatureGranted("r", 0, grant("lease")))
    assert door.messages["encode"][-1] == EncodeTarget("r", 0, grant("lease"))
    assert door.messages["language"][-1] == GrantPassed("lease", ())
    door.tell("encode", Encoded("r", 0, cached=False))
    timing = PrefillTiming(0.1, 0.2, 0.3, 0.4)
    door.wait(1.5)
    door.tell("language", Tokens((TokenEvent("r", (5,), None, 3, timing=timing),), LoadReport()))
    assert reader.token_ids == [5] and door.cluster.calibration.overhead_s > 0
    door.token(Role.LANGUAGE, 6, reason=FinishReason.LENGTH)
    assert reader.token_ids == [5, 6] and reader.finish_reason is FinishReason.LENGTH
    assert "Cancel" in door.sent("encode") and "Cancel" not in door.sent("language")


def test_its_work_is_predicted_until_it_is_known_to_be_done(door):
    start(door)
    assert door.units() == {"encode": 3, "prefill": 6, "decode": 1}
    door.tell("encode", Encoded("r", 0, cached=False))
    door.token(Role.LANGUAGE, 5)
    assert door.units() == {"encode": 0, "prefill": 0, "decode": 1}


def test_a_guided_prompt_with_media_and_two_choices_is_served_by_one_worker(door):
    first, second = door.submit(GUIDED, [ITEM], [b"block"])
    assert [each.request for each in starts(door)] == [GUIDED]
    for choice in (1, 0):
        door.token(Role.LANGUAGE, 5 + choice, choice=choice)
    door.close(second)
    assert door.messages["language"][-1] == Cancel("r", 1)
    door.token(Role.LANGUAGE, 7, reason=FinishReason.STOP)
    assert first.token_ids == [5, 7] and second.token_ids == [6]


def test_an_item_that_the_worker_has_already_is_called_off_and_may_fall_through(door):
    start(door)
    door.tell("language", FeatureShared("r", 0))
    assert door.messages["encode"][-1] == Cancel("r", item_idx=0)
    door.tell("language", FeatureGranted("r", 0, grant("lease")))
    assert door.sent("encode")[-2:] == ["StartEncode", "EncodeTarget"]


@pytest.mark.parametrize("how", ["fails", "is lost"])
def test_an_item_goes_to_another_encoder_until_the_first_token(door, how):
    reader = start(door)
    door.join(Role.ENCODE, "encode-2")
    door.tell("language", FeatureGranted("r", 0, grant("lease")))
    door.fail(Role.ENCODE, item_idx=0) if how == "fails" else door.lose("encode")
    assert (EncoderLost("r", 0, "lease") in door.messages["language"]) == (how == "is lost")
    door.tell("language", FeatureGranted("r", 0, grant("other")))
    assert door.sent("encode-2") == ["StartEncode", "EncodeTarget"]
    assert door.messages["encode-2"][-1] == EncodeTarget("r", 0, grant("other"))
    door.token(Role.LANGUAGE, 5)
    door.lose("encode-2")
    door.token(Role.LANGUAGE, 6, reason=FinishReason.STOP)
    assert reader.token_ids == [5, 6]


def test_bad_media_ends_the_request_by_name(door):
    reader = start(door)
    door.fail(Role.ENCODE, MediaError("no picture"), item_idx=0)
    reader.check_error(MediaError, r"item 0 \(image\): no picture")
    assert door.messages["language"][-1] == Cancel("r")


@pytest.mark.parametrize("lost", ["encode", "language"])
def test_a_request_waits_for_the_replacement_of_a_lost_worker(door, lost):
    reader = start(door)
    door.lose(lost)
    other = "language" if lost == "encode" else "encode"
    assert door.messages[other][-1] == Cancel("r") and not reader.has_ended
    door.join(Role(lost), f"{lost}-2")
    assert door.attempt("r.1").workers[0].replica_id == ("language-2" if lost == "language" else "language")


def test_an_answer_goes_on_at_another_worker(door):
    reader = start(door)
    door.token(Role.LANGUAGE, 5)
    door.lose("language")
    door.join(Role.LANGUAGE, "language-2")
    door.token("language-2", 6, reason=FinishReason.STOP, name="r.1")
    assert reader.token_ids == [5, 6]


def test_a_request_that_took_two_workers_with_it_is_refused(door):
    reader = start(door)
    door.flow.quarantine.lost(door.attempt().content, "an earlier worker", door.now)
    door.lose("language")
    reader.check_error(QuarantinedError, "this prompt were lost")


def test_a_cancelled_request_is_cancelled_everywhere_and_late_grants_go_back(door):
    door.close(start(door))
    assert door.messages["language"][-1] == door.messages["encode"][-1] == Cancel("r")
    door.tell("language", FeatureGranted("r", 0, grant("lease")))
    assert door.messages["language"][-1] == ReturnGrant("lease")


def test_a_grant_for_an_item_that_waits_for_its_turn_goes_back(door):
    """The item is a suspect, and its encoder has another one."""
    door.flow.quarantine.lost("hash", "gone", door.now)
    other = msgspec.structs.replace(REQUEST, request_id="other")
    door.flow.quarantine.lost("first", "gone", door.now)
    first = msgspec.structs.replace(ITEM, media_hash="first")
    (reader,) = door.submit(other, [first], [])
    (held,) = door.submit(REQUEST, [ITEM], [b"block"])
    door.tell("language", FeatureGranted("other", 0, grant("first")))
    door.tell("language", FeatureGranted("r", 0, grant("lease")))
    assert door.sent("encode") == ["StartEncode", "EncodeTarget"]
    door.close(held)
    assert ReturnGrant("lease") in door.messages["language"]
    door.close(reader)


@pytest.mark.parametrize("has_spoken", [False, True])
def test_a_preempted_answer_goes_on_with_its_media(door, has_spoken):
    reader = start(door)
    if has_spoken:
        door.token(Role.LANGUAGE, 5)
    door.tell("language", Preempted("r"))
    again = starts(door)[-1]
    assert again.prefills and again.request.prompt.media == REQUEST.prompt.media
    assert again.request.prompt.token_ids == (*REQUEST.prompt.token_ids, *([5] if has_spoken else []))
    assert door.sent("encode") == ["StartEncode", "Cancel", "StartEncode"]
    name = again.request.request_id
    door.tell("language", FeatureGranted(name, 0, grant("lease")))
    door.token(Role.LANGUAGE, 7, reason=FinishReason.STOP, name=name)
    assert reader.token_ids == [*([5] if has_spoken else []), 7]


def test_silence_ends_the_request_at_its_deadline(door):
    reader = start(door)
    door.wait(FIRST_TOKEN_S)
    reader.check_error(UnavailableError, "out of time")


class Apart(JointPolicy):
    """The prompt at one language worker, the answer at another."""

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        placement = Placement(("encode",) * len(request.media), "language", "language-2")
        return Decision(placement, Estimate(request, cluster, now).prediction(placement))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        raise UnavailableError("no encode worker is ready")


class EncodedAfar(JointPolicy):
    """The prompt and the answer at one worker, the item at another, while that is there."""

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        placement = Placement(("whole-2",) * len(request.media), "whole", "whole")
        return Decision(placement, Estimate(request, cluster, now).prediction(placement))


@pytest.mark.parametrize("how", ["is lost", "is silent and sends it later"])
def test_an_item_that_moves_to_the_worker_of_its_prompt_is_called_off_there(how):
    """The prompt may have got it from the first encoder all the same."""
    door = ScriptedFlow(EncodedAfar(), (Role.WHOLE,))
    door.join(Role.WHOLE, "whole-2")
    reader = start(door)
    door.tell("whole", FeatureGranted("r", 0, grant("lease")))
    if how == "is lost":
        door.tell("whole-2", Encoded("r", 0, cached=False))
        door.lose("whole-2")
    else:
        door.tell("whole-2", Stalled(("engine",)))
        for _ in range(int(MOVE_S / LOOK_EVERY_S)):
            door.wait(LOOK_EVERY_S)
            door.tell("whole", Pong())
        door.wait(LOOK_EVERY_S)
        door.tell("whole-2", Encoded("r", 0, cached=False))
    assert door.sent("whole").count("StartEncode") == 1
    door.token("whole", 5, reason=FinishReason.STOP)
    assert reader.token_ids == [5] and door.messages["whole"][-1] == Cancel("r")
    door.audit()


def test_kv_may_travel_from_one_language_worker_to_another():
    door = ScriptedFlow(Apart(), (Role.ENCODE, Role.LANGUAGE))
    door.join(Role.LANGUAGE, "language-2")
    reader = start(door)
    assert door.sent("language") == [StartPrefill.__name__] and door.calls == []
    door.tell("language", FeatureGranted("r", 0, grant("p")))
    door.tell("language", PrefillAdmitted("r"))
    (second,) = door.messages["language-2"]
    assert isinstance(second, StartDecode) and not second.prefills
    door.tell("language-2", DecodeGranted("r", grant("d")))
    assert door.messages["language"][-1] == DecodeTarget("r", grant("d"))
    assert door.messages["language-2"][-1] == GrantPassed("d", ())
    door.tell("language-2", Tokens((TokenEvent("r", (6,), FinishReason.STOP),), LoadReport()))
    assert reader.token_ids == []
    door.token(Role.LANGUAGE, 5)
    assert reader.token_ids == [5, 6] and door.sent("encode")[-1] == "Cancel"
    door.audit()
