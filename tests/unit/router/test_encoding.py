"""Encoders that fail, are lost or lose what they sent: the flight's items go elsewhere, and what was promised is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.errors import InternalError, MediaError, OverloadedError, UnavailableError, to_info
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Member, Role
from cluster.types.messages import Cancel, EncoderLost, EncodeTarget, Failed, FeatureGranted, StartEncode
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.types.transfer import Grant
from router.encoding import MAX_ATTEMPTS, EncodeStage
from router.flight import Flight
from router.ledger import Ledger
from router.members import Peer

ITEMS = [MediaItem(Modality.IMAGE, b"png", name, MediaGeometry(3)) for name in ("a", "b")]


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
    encoders: list[Peer] = field(init=False)

    def __post_init__(self):
        self.connections: dict[str, Connection] = {}
        self.encoders = [self._peer(f"e{i}", Role.ENCODE) for i in range(self.num_encoders)]
        self.prefill, decode = self._peer("p", Role.PREFILL), self._peer("d", Role.DECODE)
        self.alive = list(self.encoders)
        self.cluster = FakeCluster()
        self.stage = EncodeStage(self.cluster, self._choose, 1.0)
        self.flight = Flight(REQUEST, ITEMS, Ledger(0.0), [self.encoders[0]] * 2, self.prefill, decode)
        self.stage.start(self.flight)

    def _peer(self, name: str, role: Role) -> Peer:
        peer = Peer(Member(name, role, "", "", "", 8))
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
    assert stage.started("e1") == [0, 1]
    assert stage.sent("p") == [EncoderLost("r", 0)]
    stage.grant(0, "anew")
    stage.grant(1, "first")
    targets = [m for m in stage.sent("e1") if isinstance(m, EncodeTarget)]
    assert targets == [EncodeTarget("r", 0, grant("anew")), EncodeTarget("r", 1, grant("first"))]
    assert stage.error() is None
    assert stage.cluster.moved == [(0, "e1"), (1, "e1")]
    assert stage.flight.peers[-1] is stage.encoders[1] and stage.encoders[1].num_flights == 1


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
        stage.lose(encoder)
    assert "lost" in stage.error().message
    assert stage.started(f"e{MAX_ATTEMPTS}") == []


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
