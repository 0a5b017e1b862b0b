"""Encoders that fail, are lost or lose what they sent: the items go to other encoders, and grants are taken
back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.errors import (
    ClusterError,
    InternalError,
    MediaError,
    OverloadedError,
    QuarantinedError,
    UnavailableError,
    to_info,
)
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Member, ProcessId, Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    EncoderLost,
    EncodeTarget,
    Failed,
    FeatureGranted,
    GrantPassed,
    ReturnGrant,
    StartEncode,
)
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.flow.context import FlowContext
from router.flow.media import MAX_ATTEMPTS, MediaFlow
from router.flow.outputs import Deliver, Output, Send
from router.flow.state import Attempt, ClientRequest, WorkerState
from router.telemetry.timeline import RequestTimeline
from tests.fakes.scripted_flow import grant

NOW = 7.0
PROCESS = ProcessId("boot", 1, 2, 3)
ITEMS = tuple(
    MediaItem(
        Modality.IMAGE, b"png", name, MediaGeometry(3), item_idx=idx, param=f"messages[{idx}].content[0]"
    )
    for idx, name in enumerate(("a", "b"))
)


def placed(name: str, offset: int) -> PlacedMedia:
    return PlacedMedia(Modality.IMAGE, name, ((offset, 3),), MediaGeometry(3))


REQUEST = GenerateRequest(
    "r",
    Prompt((1, *[9] * 6, 2), (placed("a", 1), placed("b", 4))),
    (SamplingParams(),),
    StopParams(3),
)


class StagePlacer:
    """Knows which encoders live, and where the stage says that items are worked on."""

    def __init__(self, alive: list[WorkerState]):
        self.cluster = self
        self.moved: list[tuple[int, str]] = []
        self._alive = alive

    def item_moved(self, request_id, item_idx, encoder):
        self.moved.append((item_idx, encoder))

    def item_done(self, request_id, item_idx):
        pass

    def next_encoder(self, attempt, item_idx, last, now):
        others = [encoder.replica_id for encoder in self._alive if encoder.replica_id != last]
        if not others:
            raise UnavailableError("no encode worker is ready")
        return others[0]


def worker(name: str, role: Role) -> WorkerState:
    return WorkerState(
        Member(
            replica_id=name, role=role, address="", model="", layout="", num_blocks=8, processes=(PROCESS,)
        )
    )


class Stage:
    """An attempt with both items at the first of several encoders, and what its media side does."""

    def __init__(self, num_encoders: int, items: tuple[MediaItem, ...] = ITEMS):
        self.encoders = [worker(f"e{i}", Role.ENCODE) for i in range(num_encoders)]
        self.prefill, self.decode = worker("p", Role.PREFILL), worker("d", Role.DECODE)
        self.alive = list(self.encoders)
        placer: Any = StagePlacer(self.alive)
        self.moved = placer.moved
        self.context = FlowContext(placer, 1.0)
        self.context.workers.update((each.replica_id, each) for each in self.encoders)
        self.quarantine = self.context.quarantine
        self.media = MediaFlow(self.context)
        self.outputs: list[Output] = []
        self.attempt = self.begin(items)

    def begin(self, items: Sequence[MediaItem]) -> Attempt:
        client = ClientRequest(REQUEST, items, (), RequestTimeline(0.0))
        encoders = [self.encoders[0]] * len(items)
        attempt = Attempt(
            client=client,
            request=REQUEST,
            choice_idxs=(0,),
            encoders=encoders,
            prompt_worker=self.prefill,
            decode=self.decode,
            codec="raw",
            returning=frozenset(),
            content=None,
            started_at=0.0,
        )
        self.media.start(attempt, NOW)
        return attempt

    # What happens, and what came of it

    def done(self) -> list[Output]:
        self.outputs += self.context.take_outputs()
        return self.outputs

    def sent(self, name: str) -> list[AnyMessage]:
        return [each.message for each in self.done() if isinstance(each, Send) and each.replica_id == name]

    def started(self, name: str) -> list[int]:
        return [m.item_idx for m in self.sent(name) if isinstance(m, StartEncode)]

    def grant(self, item_idx: int, lease_id: str, attempt: Attempt | None = None) -> None:
        granted = FeatureGranted("r", item_idx, grant(lease_id))
        self.media.on_granted(attempt or self.attempt, granted, NOW)

    def fails(self, encoder: int, error, item_idx: int = 0) -> None:
        message = Failed("r", to_info(error), item_idx)
        self.media.on_failed(self.attempt, self.encoders[encoder], message, NOW)

    def lose(self, encoder: int, *others: Attempt) -> None:
        self.alive.remove(self.encoders[encoder])
        for attempt in (self.attempt, *others):
            self.media.on_lost(attempt, self.encoders[encoder], NOW)

    def land(self) -> None:
        self.attempt.has_landed = True
        self.media.on_landed(self.attempt, NOW)

    def silent(self, encoder: int) -> None:
        self.media.on_silent(self.attempt, self.encoders[encoder], NOW)

    def error(self) -> ClusterError | None:
        """Why the attempt has failed: told to the client, or for another attempt to go on with."""
        told = [each.event for each in self.done() if isinstance(each, Deliver)]
        assert len(told) + (self.attempt.failure is not None) == self.attempt.has_failed
        return next((each for each in told if isinstance(each, ClusterError)), self.attempt.failure)


def test_items_of_a_lost_encoder_go_to_another_and_prefill_is_told_of_those_that_had_its_grant():
    stage = Stage(2)
    stage.grant(0, "lease")
    stage.lose(0)
    assert stage.sent("p") == [GrantPassed("lease", (PROCESS,)), EncoderLost("r", 0, "lease")]
    stage.grant(0, "anew")
    stage.grant(1, "first")
    assert stage.started("e1") == [0], "each may be what ended the first encoder: one at a time"
    stage.media.on_encoded(stage.attempt, 0, NOW)
    assert stage.started("e1") == [0, 1]
    targets = [m for m in stage.sent("e1") if isinstance(m, EncodeTarget)]
    assert targets == [EncodeTarget("r", 0, grant("anew")), EncodeTarget("r", 1, grant("first"))]
    assert stage.error() is None
    assert stage.moved == [(0, "e1"), (1, "e1")]
    assert stage.attempt.workers[-1] is stage.encoders[1] and stage.encoders[1].num_requests == 1


def test_of_equal_items_one_is_sent_and_another_only_if_prefill_grants_it_room_of_its_own():
    stage = Stage(1, ITEMS * 32)
    assert stage.started("e0") == [0, 1]
    for item_idx in range(2, 64):
        stage.media.on_shared(stage.attempt, item_idx, NOW)
    assert stage.started("e0") == [0, 1]
    stage.grant(5, "its own")
    assert stage.started("e0") == [0, 1, 5]
    assert stage.sent("e0")[-1] == EncodeTarget("r", 5, grant("its own"))
    assert stage.moved == [(5, "e0")] and stage.error() is None


def test_without_another_encoder_the_attempt_fails_once_by_name():
    stage = Stage(1)
    stage.lose(0)
    assert "the encode worker was lost" in str(stage.error())


@pytest.mark.parametrize(
    "error", [UnavailableError("slow"), OverloadedError("full", retry_after_s=2.0), InternalError("bug")]
)
def test_an_item_that_an_encoder_gives_up_goes_to_another_or_fails_as_it_said(error):
    stage = Stage(2)
    stage.fails(0, error)
    assert stage.started("e1") == [0]
    assert stage.sent("e0")[-1] == Cancel("r", item_idx=0)
    stage.alive.remove(stage.encoders[0])
    stage.fails(1, error)
    answer = stage.error()
    assert answer is not None and type(answer) is type(error)
    assert answer.retry_after_s == error.retry_after_s


def test_bad_media_is_not_carried_from_encoder_to_encoder():
    stage = Stage(2)
    stage.fails(0, MediaError("no picture"), item_idx=1)
    assert stage.started("e1") == []
    error = stage.error()
    assert error is not None
    assert (error.message, error.param) == ("item 1 (image): no picture", "messages[1].content[0]")


def test_the_last_words_of_an_earlier_encoder_are_ignored():
    stage = Stage(3)
    stage.fails(0, UnavailableError("slow"))
    stage.fails(0, UnavailableError("slow, said again"))
    stage.fails(0, MediaError("broken on its way"))
    assert stage.started("e1") == [0] and stage.started("e2") == []
    assert stage.error() is None


def test_embeddings_that_did_not_arrive_are_sent_again_but_not_for_ever():
    stage = Stage(1)
    for attempt in range(MAX_ATTEMPTS):
        stage.grant(0, f"lease{attempt}")
    assert stage.started("e0") == [0, 1, *[0] * (MAX_ATTEMPTS - 1)]
    stage.grant(0, "one too many")
    assert "did not arrive" in str(stage.error())


def test_an_item_is_tried_at_so_many_encoders_and_no_more():
    stage = Stage(MAX_ATTEMPTS + 2)
    for encoder in range(MAX_ATTEMPTS):
        assert stage.error() is None
        stage.fails(encoder, UnavailableError("slow"))
        stage.alive.remove(stage.encoders[encoder])
    assert "slow" in str(stage.error())
    assert stage.started(f"e{MAX_ATTEMPTS}") == []


def test_an_item_that_two_encoders_did_not_survive_ends_its_request_by_name():
    stage = Stage(4)
    stage.lose(0)
    stage.grant(0, "lease")
    assert stage.started("e1") == [0]
    stage.lose(1)
    error = stage.error()
    assert isinstance(error, QuarantinedError) and error.status == 422
    assert error.message.startswith("item 0 (image): the workers that encoded it were lost")
    assert stage.started("e2") == stage.started("e3") == []
    assert stage.quarantine.is_barred("a", NOW) and not stage.quarantine.is_barred("b", NOW)


def test_a_bystander_of_a_loss_is_encoded_though_the_item_beside_it_ends_another_encoder():
    """Two requests, an item each; the first one's ends encoders."""
    stage = Stage(4)
    stage.attempt.media.pop(), stage.attempt.unencoded.discard(1)
    other = stage.begin([ITEMS[1]])
    stage.lose(0, other)
    stage.grant(0, "lease")
    stage.grant(0, "other", other)
    assert len(stage.started("e1")) == 1, "the other suspect waits"
    stage.lose(1)
    assert isinstance(stage.error(), QuarantinedError)
    stage.land()
    stage.media.on_lost(other, stage.encoders[1], NOW)
    assert len(stage.started("e2")) == 1 and not other.has_failed
    stage.media.on_encoded(other, 0, NOW)
    assert not stage.quarantine.is_suspect("b", NOW) and stage.quarantine.num_barred == 1


def test_a_suspect_whose_request_is_over_makes_room_for_the_next():
    stage = Stage(2)
    other = stage.begin(ITEMS[::-1])
    stage.lose(0, other)
    stage.grant(0, "first")
    stage.grant(1, "the same item", other)
    assert stage.started("e1") == [0, 1], "the same item, of both requests"
    stage.grant(0, "kept", other)
    stage.land()
    assert stage.started("e1") == [0, 1, 0]
    assert stage.sent("e1")[-1] == EncodeTarget("r", 0, grant("kept"))


def test_a_suspect_without_room_keeps_no_other_from_its_encoder():
    """Otherwise its room could be that of the other one (seed 201444)."""
    stage = Stage(2)
    stage.lose(0)
    assert stage.started("e1") == []
    stage.grant(1, "lease")
    assert stage.started("e1") == [1]
    assert stage.sent("e1")[-1] == EncodeTarget("r", 1, grant("lease"))
    stage.grant(0, "later")
    assert stage.started("e1") == [1]
    stage.media.on_encoded(stage.attempt, 1, NOW)
    assert stage.started("e1") == [1, 0]


def test_of_its_own_suspects_a_prompt_worker_is_asked_for_grants():
    stage = Stage(1)
    stage.attempt.prompt_worker = stage.encoders[0]
    assert stage.media.own_items(stage.attempt, NOW) == (0, 1)
    stage.quarantine.lost("a", "an earlier worker", NOW)
    assert stage.media.own_items(stage.attempt, NOW) == (1,)


def test_a_grant_for_an_item_that_is_held_goes_back_when_its_request_is_over():
    stage = Stage(2)
    stage.lose(0)
    stage.grant(0, "used")
    stage.grant(1, "unused")
    stage.land()
    assert stage.sent("p")[-1] == ReturnGrant("unused")


def test_a_grant_that_comes_too_often_goes_back_with_the_end_of_its_request():
    """Before, the owner kept its blocks for the lease's time."""
    stage = Stage(2)
    for idx in range(MAX_ATTEMPTS + 1):
        stage.grant(0, f"lease {idx}")
    assert stage.error() is not None
    stage.land()
    assert stage.sent("p")[-2:] == [
        GrantPassed(f"lease {MAX_ATTEMPTS - 1}", (PROCESS,)), ReturnGrant(f"lease {MAX_ATTEMPTS}")
    ]  # fmt: skip


def test_an_item_that_is_held_is_forgotten_with_its_request():
    """Also if the encoder that it waits for is gone with the other suspect (seed 555)."""
    stage = Stage(3)
    stage.lose(0)
    stage.grant(0, "lease")
    stage.lose(1)
    assert isinstance(stage.error(), QuarantinedError)
    assert not stage.media.is_idle
    stage.land()
    assert stage.media.is_idle


def test_items_leave_a_silent_encoder_where_another_moves():
    stage = Stage(2)
    stage.grant(0, "lease")
    stage.silent(0)
    assert stage.started("e1") == [0, 1] and not len(stage.quarantine)
    assert stage.sent("e0")[-2:] == [Cancel("r", item_idx=0), Cancel("r", item_idx=1)]
    assert stage.sent("p") == [GrantPassed("lease", (PROCESS,)), EncoderLost("r", 0, "lease")]


def test_items_stay_with_a_silent_encoder_where_no_other_moves():
    stage = Stage(2)
    stage.encoders[1].is_silent = True
    stage.silent(0)
    assert stage.started("e1") == [] and stage.error() is None


def test_an_item_that_is_encoded_is_no_suspect_when_its_encoder_is_lost():
    stage = Stage(2)
    stage.media.on_encoded(stage.attempt, 0, NOW)
    stage.attempt.unencoded.discard(0)
    stage.lose(0)
    assert not stage.quarantine.is_suspect("a", NOW) and stage.quarantine.is_suspect("b", NOW)


def test_a_shared_item_of_a_lost_encoder_is_asked_for_elsewhere_only_when_it_falls_through():
    stage = Stage(2)
    stage.media.on_shared(stage.attempt, 0, NOW)
    stage.lose(0)
    assert stage.sent("p") == []
    stage.grant(1, "other")
    assert stage.started("e1") == [1]
    stage.grant(0, "lease")
    assert stage.started("e1") == [1, 0]


def test_after_the_first_token_encoders_do_not_matter():
    stage = Stage(2)
    stage.attempt.choices[0].has_first_token = True
    stage.fails(0, UnavailableError("slow"))
    stage.lose(0)
    assert stage.started("e1") == [] and stage.error() is None


def test_an_item_leaves_one_silent_encoder_and_no_more():
    """It may be so large that every encoder is silent over it."""
    stage = Stage(3)
    stage.silent(0)
    assert stage.started("e1") == [0, 1]
    stage.silent(1)
    assert stage.started("e2") == [] and stage.error() is None
