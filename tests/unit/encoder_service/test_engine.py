"""The encoder engine, stepped by hand; prefill's feature store stands at the other end."""

import pytest

from cluster.types.messages import Cancel, Encoded, EncodeTarget, Failed, FeatureGranted, StartEncode
from tests.fakes.engines import DOOR, MARGIN_S, TIMEOUT_S, Rig, make_item

ITEM, LARGE = make_item("a", 5), make_item("large", 20)


@pytest.fixture
def rig():
    rig = Rig(cache_blocks=5, feature_blocks=8)
    yield rig
    rig.turn(20)
    rig.clock.at += 2 * (TIMEOUT_S + MARGIN_S)
    rig.turn(5)
    for key in list(rig.features._items):
        rig.features.release(key)
    rig.audit()


def start(rig, request_id="r", item=ITEM, item_idx=0):
    rig.receive("encoder", StartEncode(request_id, item_idx, item, TIMEOUT_S))


def target(rig, request_id="r", item=ITEM, item_idx=0) -> None:
    """Prefill makes room, the door passes the grant on."""
    key = (request_id, item_idx)

    def pass_on(granted: FeatureGranted) -> None:
        rig.receive("encoder", EncodeTarget(request_id, item_idx, granted.grant))

    rig.features.reserve(key, request_id, item.geometry.num_tokens, TIMEOUT_S, pass_on)


def said(rig, kind):
    return [message for message in rig.encoder.said if isinstance(message, kind)]


@pytest.mark.parametrize("target_first", [True, False])
def test_embeddings_arrive_whether_the_target_comes_before_or_after(rig, target_first):
    start(rig)
    if not target_first:
        rig.turn(5)
        assert "a" in rig.cache
    target(rig)
    rig.turn(5)
    assert said(rig, Encoded) == [Encoded("r", 0, cached=False)]
    assert rig.features.rows(("r", 0), 0, 5).flatten().tolist() == [1000 + ord("a")] * 5


def test_one_item_of_many_requests_is_encoded_once(rig):
    for i in range(3):
        start(rig, f"r{i}")
    assert len(rig.executor.jobs) == 0
    rig.encoder.step()
    assert len(rig.executor.jobs) == 1
    for i in range(3):
        target(rig, f"r{i}")
    rig.turn(8)
    assert [message.cached for message in said(rig, Encoded)] == [False] * 3


def test_an_item_seen_before_is_sent_from_the_cache(rig):
    for request_id in ("r", "s"):
        start(rig, request_id)
        target(rig, request_id)
        rig.turn(5)
    assert [message.cached for message in said(rig, Encoded)] == [False, True]


def test_rows_evicted_before_their_target_came_are_encoded_again(rig):
    start(rig)
    rig.turn(5)
    start(rig, "s")
    start(rig, "t", LARGE)
    rig.turn(5)
    assert "a" not in rig.cache and "large" in rig.cache
    target(rig)
    target(rig, "s")
    rig.turn(8)
    assert said(rig, Encoded) == [Encoded("r", 0, cached=False), Encoded("s", 0, cached=False)]


def test_an_item_waits_while_others_are_pinned_by_their_transfer(rig):
    rig.network.faults.post_polls = 5
    start(rig)
    target(rig)
    rig.turn(2)
    start(rig, "t", LARGE)
    rig.turn(2)
    assert "large" not in rig.cache
    rig.turn(12)
    assert "large" in rig.cache


def test_an_item_larger_than_the_memory_is_refused(rig):
    start(rig, item=make_item("huge", 21))
    rig.turn(3)
    (failed,) = said(rig, Failed)
    assert failed.item_idx == 0 and "larger" in failed.error.message


def test_a_bad_item_fails_all_who_want_it_and_nobody_else(rig):
    rig.bad_items.add("bad")
    start(rig, "r", make_item("bad", 3))
    start(rig, "s", make_item("bad", 3), item_idx=1)
    start(rig, "t")
    target(rig, "t")
    rig.turn(6)
    assert [(m.request_id, m.item_idx) for m in said(rig, Failed)] == [("r", 0), ("s", 1)]
    assert [m.request_id for m in said(rig, Encoded)] == ["t"]


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_leaving_at_any_moment_leaves_nothing_behind(rig, num_turns, how):
    rig.network.faults.post_polls = 2
    start(rig)
    target(rig)
    rig.turn(num_turns)
    if how == "cancel":
        rig.receive("encoder", Cancel("r"))
    else:
        rig.encoder.tell(rig.encoder.engine.drop_door, DOOR)
    rig.turn(10)
    assert rig.encoder.engine.load().num_waiting == 0


@pytest.mark.parametrize("num_turns", range(4))
def test_one_delivery_of_a_request_can_be_called_off_and_asked_for_again(rig, num_turns):
    other = make_item("b", 3)
    start(rig)
    start(rig, item=other, item_idx=1)
    start(rig, "s")
    target(rig, "r", other, item_idx=1)
    rig.turn(num_turns)
    rig.receive("encoder", Cancel("r", item_idx=0))
    target(rig, "s")
    rig.turn(8)
    assert sorted((m.request_id, m.item_idx) for m in said(rig, Encoded)) == [("r", 1), ("s", 0)]
    assert rig.encoder.engine.load().num_waiting == 0 and not said(rig, Failed)
    start(rig)
    target(rig)
    rig.turn(5)
    assert said(rig, Encoded)[-1] == Encoded("r", 0, cached=True)


def test_an_item_that_nobody_else_wants_is_not_encoded_when_it_is_called_off(rig):
    start(rig)
    rig.encoder.step()
    rig.receive("encoder", Cancel("r", item_idx=0))
    rig.turn(5)
    assert rig.encoder.engine.load().is_idle and "a" not in rig.cache


def test_a_target_for_a_request_that_has_ended_is_given_back(rig):
    target(rig)
    rig.features.release(("r", 0))
    rig.turn(3)
    assert rig.features.num_open_leases == 0


def test_a_delivery_without_a_target_ends_with_its_deadline(rig):
    start(rig)
    rig.turn(3)
    rig.clock.at += TIMEOUT_S
    rig.turn()
    (failed,) = said(rig, Failed)
    assert "waited too long" in failed.error.message
