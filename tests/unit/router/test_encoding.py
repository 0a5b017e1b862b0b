"""Encoders that fail, are lost or lose what they sent: the flight's items go elsewhere, and what was promised is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.errors import (
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
from cluster.types.transfer import Grant
from router.flow.encoding import MAX_ATTEMPTS, EncodeStage
from router.flow.flight import Flight
from router.flow.quarantine import Quarantine
from router.members import Peer
from router.telemetry.timeline import RequestTimeline
from tests.fakes.clock import ManualClock

PROCESS = ProcessId("boot", 1, 2, 3)
ITEMS = tuple(MediaItem(Modality.IMAGE, b"png", name, MediaGeometry(3)) for name in ("a", "b"))


def placed(name: str, offset: int) -> PlacedMedia:
    return PlacedMedia(Modality.IMAGE, name, ((offset, 3),), MediaGeometry(3))


REQUEST = GenerateRequest(
    "r",
    Prompt((1, *[9] * 6, 2), (placed("a", 1), placed("b", 4))),
    (SamplingParams(),),
    StopParams(3),
)


class Connection:
    def __init__(self):
        self.sent: list = []

    def send(self, message) -> None:
        self.sent.append(message)


def grant(lease_id: str) -> Grant:
    return Grant(lease_id, b"", 0, 8, "", (0,), (0,), 1.0)


class FakeCluster:
    """Where the stage says that items are worked on."""

    def __init__(self):
        self.moved: list[tuple[int, str]] = []
        self.done: list[int] = []

    def item_moved(self, request_id, item_idx, encoder):
        self.moved.append((item_idx, encoder))

    def item_done(self, request_id, item_idx):
        self.done.append(item_idx)


@dataclass
class Stage:
    """A flight with both items at the first of several encoders."""

    num_encoders: int
    items: tuple[MediaItem, ...] = ITEMS
    encoders: list[Peer] = field(init=False)

    def __post_init__(self):
        self.connections: dict[str, Connection] = {}
        self.encoders = [self._peer(f"e{i}", Role.ENCODE) for i in range(self.num_encoders)]
        self.prefill, decode = self._peer("p", Role.PREFILL), self._peer("d", Role.DECODE)
        self.alive = list(self.encoders)
        self.cluster = FakeCluster()
        self.clock = ManualClock()
        self.quarantine = Quarantine(self.clock)
        self.stage = EncodeStage(
            self.cluster, self._choose, 1.0, self.quarantine, lambda _, f, *args: f(*args)
        )
        self.flight = Flight(
            REQUEST,
            self.items,
            RequestTimeline(0.0),
            [self.encoders[0]] * len(self.items),
            self.prefill,
            decode,
        )
        self.stage.start(self.flight)

    def _peer(self, name: str, role: Role) -> Peer:
        peer = Peer(Member(name, role, "", "", "", 8, processes=(PROCESS,)))
        self.connections[name] = Connection()
        peer.attach(self.connections[name])
        return peer

    def _choose(self, flight, item_idx, last):
        others = [peer for peer in self.alive if peer is not last]
        if not others:
            raise UnavailableError("no encode worker is ready")
        return others[0]

    def sent(self, name: str) -> list:
        return self.connections[name].sent

    def started(self, name: str) -> list[int]:
        return [m.item_idx for m in self.sent(name) if isinstance(m, StartEncode)]

    def grant(self, item_idx: int, lease_id: str) -> None:
        self.stage.on_granted(self.flight, FeatureGranted("r", item_idx, grant(lease_id)))

    def fail(self, encoder: int, error, item_idx: int = 0) -> None:
        self.stage.on_failed(self.flight, self.encoders[encoder], Failed("r", to_info(error), item_idx))

    def lose(self, encoder: int) -> None:
        self.alive.remove(self.encoders[encoder])
        self.stage.on_lost(self.flight, self.encoders[encoder])

    def error(self):
        queue = self.flight._lines[0].queue
        return None if queue.empty() else queue.get_nowait()


def test_items_of_a_lost_encoder_go_to_another_and_prefill_is_told_of_those_that_had_its_grant():
    stage = Stage(2)
    stage.grant(0, "lease")
    stage.lose(0)
    assert stage.started("e1") == [
        0
    ]  # it may be what ended the first one, and so may the other: one at a time
    assert stage.sent("p") == [GrantPassed("lease", (PROCESS,)), EncoderLost("r", 0, "lease")]
    stage.grant(0, "anew")
    stage.grant(1, "first")
    stage.stage.on_encoded(stage.flight, 0)
    assert stage.started("e1") == [0, 1]
    targets = [m for m in stage.sent("e1") if isinstance(m, EncodeTarget)]
    assert targets == [EncodeTarget("r", 0, grant("anew")), EncodeTarget("r", 1, grant("first"))]
    assert stage.error() is None
    assert stage.cluster.moved == [(0, "e1"), (1, "e1")]
    assert stage.flight.peers[-1] is stage.encoders[1] and stage.encoders[1].num_flights == 1


def test_of_equal_items_one_is_sent_and_another_only_if_prefill_grants_it_room_of_its_own():
    stage = Stage(1, ITEMS * 32)
    assert stage.started("e0") == [0, 1]
    for item_idx in range(2, 64):
        stage.stage.on_shared(stage.flight, item_idx)
    assert stage.started("e0") == [0, 1]
    stage.grant(5, "its own")
    assert stage.started("e0") == [0, 1, 5]
    assert stage.sent("e0")[-1] == EncodeTarget("r", 5, grant("its own"))
    assert stage.cluster.moved == [(5, "e0")] and stage.error() is None


def test_without_another_encoder_the_flight_fails_once_by_name():
    stage = Stage(1)
    stage.lose(0)
    assert "the encode worker was lost" in stage.error().message
    assert stage.error() is None


@pytest.mark.parametrize(
    "error", [UnavailableError("slow"), OverloadedError("full", retry_after_s=2.0), InternalError("bug")]
)
def test_an_item_that_an_encoder_gives_up_goes_to_another_or_fails_as_it_said(error):
    stage = Stage(2)
    stage.fail(0, error)
    assert stage.started("e1") == [0]
    assert stage.sent("e0")[-1] == Cancel("r", item_idx=0)
    stage.alive.remove(stage.encoders[0])
    stage.fail(1, error)
    answer = stage.error()
    assert type(answer) is type(error) and answer.retry_after_s == error.retry_after_s


def test_bad_media_is_not_carried_from_encoder_to_encoder():
    stage = Stage(2)
    stage.fail(0, MediaError("no picture"), item_idx=1)
    assert stage.started("e1") == []
    assert stage.error().message == "item 1 (image): no picture"


def test_the_last_words_of_an_earlier_encoder_are_ignored():
    stage = Stage(3)
    stage.fail(0, UnavailableError("slow"))
    stage.fail(0, UnavailableError("slow, said again"))
    stage.fail(0, MediaError("broken on its way"))
    assert stage.started("e1") == [0] and stage.started("e2") == []
    assert stage.error() is None


def test_embeddings_that_did_not_arrive_are_sent_again_but_not_for_ever():
    stage = Stage(1)
    for attempt in range(MAX_ATTEMPTS):
        stage.grant(0, f"lease{attempt}")
    assert stage.started("e0") == [0, 1, *[0] * (MAX_ATTEMPTS - 1)]
    stage.grant(0, "one too many")
    assert "did not arrive" in stage.error().message


def test_items_wander_over_so_many_encoders_and_no_more():
    stage = Stage(MAX_ATTEMPTS + 2)
    for encoder in range(MAX_ATTEMPTS):
        assert stage.error() is None
        stage.fail(encoder, UnavailableError("slow"))
        stage.alive.remove(stage.encoders[encoder])
    assert "slow" in stage.error().message
    assert stage.started(f"e{MAX_ATTEMPTS}") == []


def test_an_item_that_two_encoders_did_not_survive_ends_its_request_by_name():
    stage = Stage(4)
    stage.lose(0)
    assert stage.started("e1") == [0]
    stage.lose(1)
    error = stage.error()
    assert isinstance(error, QuarantinedError) and error.status == 422
    assert error.message.startswith("item 0 (image): the workers that encoded it were lost")
    assert stage.started("e2") == stage.started("e3") == []
    assert stage.quarantine.is_barred("a") and not stage.quarantine.is_barred("b")


def test_a_bystander_of_a_loss_is_encoded_though_the_item_beside_it_ends_another_encoder():
    """Two requests, an item each; the first one's ends encoders."""
    stage = Stage(4)
    stage.flight.errands.pop(), stage.flight.encoding.discard(1)
    other = Flight(
        REQUEST, [ITEMS[1]], RequestTimeline(0.0), [stage.encoders[0]], stage.prefill, stage.flight.decode
    )
    stage.stage.start(other)
    stage.alive.remove(stage.encoders[0])
    for flight in (stage.flight, other):
        stage.stage.on_lost(flight, stage.encoders[0])
    assert len(stage.started("e1")) == 1, "the other suspect waits"
    stage.lose(1)
    assert isinstance(stage.error(), QuarantinedError)
    stage.flight.has_landed = True
    stage.stage.on_landed(stage.flight)
    stage.stage.on_lost(other, stage.encoders[1])
    assert len(stage.started("e2")) == 1 and not other.has_failed
    stage.stage.on_encoded(other, 0)
    assert not stage.quarantine.is_suspect("b") and stage.quarantine.num_barred == 1


def test_a_suspect_whose_request_is_over_makes_room_for_the_next():
    stage = Stage(2)
    other = Flight(
        REQUEST,
        ITEMS[::-1],
        RequestTimeline(0.0),
        [stage.encoders[0]] * 2,
        stage.prefill,
        stage.flight.decode,
    )
    stage.stage.start(other)
    stage.alive.remove(stage.encoders[0])
    for flight in (stage.flight, other):
        stage.stage.on_lost(flight, stage.encoders[0])
    assert stage.started("e1") == [0, 1], "the same item, of both requests"
    stage.stage.on_granted(other, FeatureGranted("r", 0, grant("kept")))
    stage.flight.has_landed = True
    stage.stage.on_landed(stage.flight)
    assert stage.started("e1") == [0, 1, 0]
    assert stage.sent("e1")[-1] == EncodeTarget("r", 0, grant("kept"))


def test_a_grant_for_an_item_that_is_held_goes_back_when_its_request_is_over():
    stage = Stage(2)
    stage.lose(0)
    stage.grant(1, "unused")
    stage.flight.has_landed = True
    stage.stage.on_landed(stage.flight)
    assert stage.sent("p")[-1] == ReturnGrant("unused")


def test_items_leave_a_silent_encoder_where_another_moves():
    stage = Stage(2)
    stage.grant(0, "lease")
    stage.stage.on_silent(stage.flight, stage.encoders[0])
    assert stage.started("e1") == [0, 1] and not len(stage.quarantine)
    assert stage.sent("e0")[-2:] == [Cancel("r", item_idx=0), Cancel("r", item_idx=1)]
    assert stage.sent("p") == [GrantPassed("lease", (PROCESS,)), EncoderLost("r", 0, "lease")]


def test_items_stay_with_a_silent_encoder_where_no_other_moves():
    stage = Stage(2)
    stage.encoders[1].is_silent = True
    stage.stage.on_silent(stage.flight, stage.encoders[0])
    assert stage.started("e1") == [] and stage.error() is None


def test_an_item_that_is_encoded_is_no_suspect_when_its_encoder_is_lost():
    stage = Stage(2)
    stage.stage.on_encoded(stage.flight, 0)
    stage.flight.encoding.discard(0)
    stage.lose(0)
    assert not stage.quarantine.is_suspect("a") and stage.quarantine.is_suspect("b")


def test_a_shared_item_of_a_lost_encoder_is_asked_for_elsewhere_only_when_it_falls_through():
    stage = Stage(2)
    stage.stage.on_shared(stage.flight, 0)
    stage.lose(0)
    assert stage.started("e1") == [1] and stage.sent("p") == []
    stage.grant(0, "lease")
    assert stage.started("e1") == [1, 0]


def test_after_the_first_token_encoders_do_not_matter():
    stage = Stage(2)
    stage.flight._lines[0].has_first_token = True
    stage.fail(0, UnavailableError("slow"))
    stage.lose(0)
    assert stage.started("e1") == [] and stage.error() is None


def test_an_item_leaves_one_silent_encoder_and_no_more():
    """It may be so large that every encoder is silent over it."""
    stage = Stage(3)
    stage.stage.on_silent(stage.flight, stage.encoders[0])
    assert stage.started("e1") == [0, 1]
    stage.stage.on_silent(stage.flight, stage.encoders[1])
    assert stage.started("e2") == [] and stage.error() is None
