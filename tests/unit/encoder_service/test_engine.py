"""The encoder engine, stepped by hand; prefill's feature store stands at the other end."""

import pytest
import torch

from cluster.types.messages import CacheChanged, Cancel, Encoded, Failed
from tests.fakes.encoder import EncoderRig
from tests.fakes.engines import DOOR, TIMEOUT_S
from tests.fakes.requests import item_value, make_item

ITEM, LARGE = make_item("a", 5), make_item("large", 20)


@pytest.fixture
def rig():
    rig = EncoderRig(cache_blocks=5, feature_blocks=8)
    yield rig
    rig.finish()


@pytest.mark.parametrize("target_first", [True, False])
def test_embeddings_arrive_whether_the_target_comes_before_or_after(rig, target_first):
    rig.start(ITEM)
    if not target_first:
        rig.turn(5)
        assert "a" in rig.cache
    rig.target(ITEM)
    rig.turn(5)
    assert rig.said(Encoded) == [Encoded("r", 0, cached=False)]
    assert torch.cat(rig.features.rows(("r", 0), 0, 5)).flatten().tolist() == [
        item_value("a", i) for i in range(5)
    ]


def test_one_item_of_many_requests_is_encoded_once(rig):
    for i in range(3):
        rig.start(ITEM, f"r{i}")
    assert len(rig.executor.jobs) == 0
    rig.encoder.step()
    assert len(rig.executor.jobs) == 1
    for i in range(3):
        rig.target(ITEM, f"r{i}")
    rig.turn(8)
    assert [message.cached for message in rig.said(Encoded)] == [False] * 3


def test_an_item_seen_before_is_sent_from_the_cache(rig):
    for request_id in ("r", "s"):
        rig.start(ITEM, request_id)
        rig.target(ITEM, request_id)
        rig.turn(5)
    assert [message.cached for message in rig.said(Encoded)] == [False, True]


def test_rows_evicted_before_their_target_came_are_encoded_again(rig):
    rig.start(ITEM)
    rig.turn(5)
    rig.start(ITEM, "s")
    rig.start(LARGE, "t")
    rig.turn(5)
    assert "a" not in rig.cache and "large" in rig.cache
    rig.target(ITEM)
    rig.target(ITEM, "s")
    rig.turn(8)
    assert rig.said(Encoded) == [Encoded("r", 0, cached=False), Encoded("s", 0, cached=False)]


def test_an_item_waits_while_others_are_pinned_by_their_transfer(rig):
    rig.network.faults.post_polls = 5
    rig.start(ITEM)
    rig.target(ITEM)
    rig.turn(2)
    rig.start(LARGE, "t")
    rig.turn(2)
    assert "large" not in rig.cache
    rig.turn(12)
    assert "large" in rig.cache


def test_an_item_larger_than_the_memory_is_refused(rig):
    rig.start(make_item("huge", 21))
    rig.turn(3)
    (failed,) = rig.said(Failed)
    assert failed.item_idx == 0 and "larger" in failed.error.message


def test_a_bad_item_fails_its_deliveries_and_no_other(rig):
    rig.bad_items.add("bad")
    rig.start(make_item("bad", 3), "r")
    rig.start(make_item("bad", 3), "s", item_idx=1)
    rig.start(ITEM, "t")
    rig.target(ITEM, "t")
    rig.turn(6)
    assert [(m.request_id, m.item_idx) for m in rig.said(Failed)] == [("r", 0), ("s", 1)]
    assert [m.request_id for m in rig.said(Encoded)] == ["t"]


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_leaving_at_any_moment_leaves_nothing_behind(rig, num_turns, how):
    rig.network.faults.post_polls = 2
    rig.start(ITEM)
    rig.target(ITEM)
    rig.turn(num_turns)
    if how == "cancel":
        rig.receive("encoder", Cancel("r"))
    else:
        rig.encoder.tell(rig.encoder.engine.drop_door, DOOR)
    rig.turn(10)
    assert rig.encoder.engine.load().num_waiting == 0


@pytest.mark.parametrize("num_turns", range(4))
def test_one_delivery_of_a_request_can_be_cancelled_and_requested_again(rig, num_turns):
    other = make_item("b", 3)
    rig.start(ITEM)
    rig.start(other, item_idx=1)
    rig.start(ITEM, "s")
    rig.target(other, item_idx=1)
    rig.turn(num_turns)
    rig.receive("encoder", Cancel("r", item_idx=0))
    rig.target(ITEM, "s")
    rig.turn(8)
    assert sorted((m.request_id, m.item_idx) for m in rig.said(Encoded)) == [("r", 1), ("s", 0)]
    assert rig.encoder.engine.load().num_waiting == 0 and not rig.said(Failed)
    rig.start(ITEM)
    rig.target(ITEM)
    rig.turn(5)
    assert rig.said(Encoded)[-1] == Encoded("r", 0, cached=True)


@pytest.mark.parametrize("num_turns", range(6))
def test_an_item_that_is_asked_for_twice_is_one_delivery(rig, num_turns):
    """As when prefill has granted again because the first grant had expired."""
    rig.network.faults.post_polls = 2
    rig.start(ITEM)
    rig.turn(num_turns)
    rig.start(ITEM)
    rig.turn(1)
    load = rig.encoder.engine.load()
    assert load.num_waiting == 1 and load.held_bytes >= len(ITEM.data)
    rig.target(ITEM)
    rig.turn(8)
    assert [(m.request_id, m.item_idx) for m in rig.said(Encoded)] == [("r", 0)]
    assert rig.encoder.engine.load().is_idle and rig.encoder.engine.load().encoded.num_encoded == 1


def test_the_end_of_an_earlier_transfer_is_not_the_end_of_an_item_that_was_asked_for_again(rig):
    rig.network.faults.post_polls = 4
    rig.start(ITEM)
    rig.target(ITEM)
    while not rig.encoder.engine.load().num_open_leases:
        rig.turn()
    rig.start(ITEM)
    while rig.encoder.engine.load().num_open_leases:
        rig.turn()
    rig.turn()
    assert rig.said(Failed) == rig.said(Encoded) == []
    assert rig.encoder.engine.load().num_waiting == 1
    rig.receive("encoder", Cancel("r"))


def test_an_item_without_deliveries_is_not_encoded(rig):
    rig.start(ITEM)
    rig.encoder.step()
    rig.receive("encoder", Cancel("r", item_idx=0))
    rig.turn(5)
    assert rig.encoder.engine.load().is_idle and "a" not in rig.cache


def test_a_target_for_a_request_that_has_ended_is_given_back(rig):
    rig.target(ITEM)
    rig.features.release(("r", 0))
    rig.turn(3)
    assert rig.features.num_open_leases == 0


@pytest.mark.parametrize("how", ["cancel", "drop", "deadline", "bad item", "requested again"])
def test_a_target_that_is_not_used_is_given_back_whatever_ends_its_delivery(rig, how):
    """Prefill waits for that word: it does not reuse the room without it."""
    if how == "bad item":
        rig.bad_items.add("a")
    rig.start(ITEM)
    rig.target(ITEM)
    rig.encoder.step()
    rig.features.release(("r", 0))
    assert rig.features.num_open_leases == 1
    match how:
        case "cancel":
            rig.receive("encoder", Cancel("r", item_idx=0))
        case "drop":
            rig.encoder.tell(rig.encoder.engine.drop_door, DOOR)
        case "deadline":
            rig.clock.at += TIMEOUT_S
        case "bad item":
            rig.turn(2)
        case "requested again":
            rig.start(ITEM)
    for _ in range(3):
        rig.encoder.step()
        rig.encoder.transfer_engine.step()
        rig.prefill.feature_transfer_engine.step()
        rig.prefill.step()
    assert rig.features.num_open_leases == 0


def test_a_delivery_without_a_target_ends_with_its_deadline(rig):
    rig.start(ITEM)
    rig.turn(3)
    rig.clock.at += TIMEOUT_S
    rig.turn()
    (failed,) = rig.said(Failed)
    assert "waited too long" in failed.error.message


def test_new_and_removed_items_are_reported_to_all_doors_first_of_all_to_a_new_one(rig):
    rig.start(ITEM)
    rig.turn(1)
    assert rig.said(CacheChanged) == [CacheChanged(("a",), ())], "it is not encoded yet"
    rig.turn(2)
    rig.start(LARGE, "s")
    rig.turn(3)
    known: set[str] = set()
    for message in rig.said(CacheChanged):
        known = (known | set(message.added)) - set(message.evicted)
    assert known == {"large"}


def test_a_broken_item_is_not_expected_any_more(rig):
    rig.bad_items.add("bad")
    rig.start(make_item("bad", 3))
    rig.encoder.step()
    rig.turn(3)
    assert rig.said(CacheChanged)[-1] == CacheChanged((), ("bad",))


def test_a_door_that_comes_later_is_told_everything_first(rig):
    rig.start(LARGE, "s")
    rig.turn(3)
    rig.encoder.said.clear()
    rig.encoder.tell(rig.encoder.outbox.add_door, DOOR + 1)
    rig.turn(2)
    assert rig.encoder.said[0] == CacheChanged(("large",), ())


def test_requests_that_share_an_item_hold_one_copy_of_its_file(rig):
    for request_id in ("r", "s", "t"):
        rig.start(make_item("a", 5), request_id)
    rig.encoder.inbox.run()
    assert rig.encoder.engine.deliveries.file_bytes == len(ITEM.data)
    rig.encoder.tell(rig.encoder.engine.cancel, "r")
    rig.turn(5)
    assert rig.encoder.engine.load().held_bytes == len(ITEM.data)


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_an_item_that_is_cancelled_while_it_waits_is_not_prepared(rig, how):
    """Two threads are busy with two others."""
    prepared, prepare = [], rig.runners["encoder"].prepare
    rig.runners["encoder"].prepare = lambda item, *rest: (
        prepared.append(item.media_hash) or prepare(item, *rest)
    )
    for number, name in enumerate(("a", "b", "given up")):
        rig.start(make_item(name, 3), f"r{number}")
    rig.encoder.inbox.run()
    if how == "cancel":
        rig.receive("encoder", Cancel("r2"))
        rig.encoder.inbox.run()
    else:
        rig.encoder.engine.drop_door(DOOR)
    rig.prepare_all()
    assert prepared == ["a", "b"]
    rig.encoder.inbox.run()
    assert rig.encoder.engine.load().num_running == (2 if how == "cancel" else 0)


def test_an_item_that_is_cancelled_while_a_thread_has_it_is_not_encoded(rig):
    rig.start(ITEM)
    rig.encoder.inbox.run()
    rig.receive("encoder", Cancel("r"))
    rig.turn(3)
    assert rig.encoder_calls == [] and rig.encoder.engine.load().num_running == 0


def test_calls_are_recorded_while_no_item_is_in_work(rig):
    waiting, in_work = ["form", "other form"], []

    def record_next() -> bool:
        in_work.append(rig.encoder.engine.load().num_running)
        return bool(waiting) and bool(waiting.pop())

    rig.runners["encoder"].record_next = record_next
    rig.start(ITEM)
    rig.encoder.step()
    assert in_work == []  # the item is being prepared
    rig.turn(5)
    assert "a" in rig.cache and not waiting and set(in_work) == {0}
    waiting.append("form")
    assert [rig.encoder.engine.step() == 0 for _ in range(2)] == [True, False]
    rig.target(ITEM)
    rig.turn(5)
