"""What an encoder holds, and what it does when memory runs out."""

from collections import Counter

import pytest
import torch

from cluster import overload
from cluster.model.failures import is_out_of_memory
from cluster.types.messages import Encoded, Failed
from encoder_service.calls import RECOVERY_S, CallBudget
from tests.fakes.clock import ManualClock
from tests.fakes.encoder import EncoderRig
from tests.fakes.requests import make_item, make_video

NUM_ROWS = 5
ITEM_BYTES = 8 * NUM_ROWS  # of a prepared item of the rig


@pytest.fixture
def make_rig():
    rigs = []

    def make(**limits: int) -> EncoderRig:
        rigs.append(EncoderRig(limits, cache_blocks=20, feature_blocks=500))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.finish()


def failed(rig: EncoderRig) -> dict[str, str]:
    """Request id → kind of error."""
    return {message.request_id: message.error.kind for message in rig.said(Failed)}


def test_two_hundred_items_at_once_never_hold_more_than_the_budget_and_all_end(make_rig):
    rig = make_rig(max_prepared_bytes=6 * ITEM_BYTES)
    rig.deliver(make_item("teacher", NUM_ROWS), "teacher")
    rig.turn(4)
    for i in range(200):
        rig.deliver(make_item(f"item {i}", NUM_ROWS), str(i))
    most = 0
    for _ in range(500):
        rig.encoder.inbox.run()
        most = max(most, rig.encoder.engine.preparation.held_bytes)
        rig.turn()
    assert 2 * ITEM_BYTES <= most <= 6 * ITEM_BYTES
    assert len(rig.said(Encoded)) == 201 and not failed(rig)


def test_items_beyond_the_queue_are_refused_with_a_time_to_come_back_and_known_ones_are_not(make_rig):
    rig = make_rig(max_queued_rows=2 * NUM_ROWS)
    for name in "abc":
        rig.start(make_item(name, NUM_ROWS), name)
    rig.start(make_item("a", NUM_ROWS), "again")
    rig.turn(5)
    (refused,) = rig.said(Failed)
    assert (refused.request_id, refused.error.kind) == ("c", "OverloadedError")
    assert refused.error.retry_after_s is not None and refused.error.retry_after_s > 0
    assert refused.error.message == overload.encoder_rows(3 * NUM_ROWS, 2 * NUM_ROWS)
    rig.deliver(make_item("c", NUM_ROWS), "later")
    rig.turn(4)
    assert [m.request_id for m in rig.said(Encoded)] == ["later"]


def test_an_item_larger_than_the_queue_is_taken_when_nothing_waits(make_rig):
    rig = make_rig(max_queued_rows=1)
    rig.deliver(make_item("a", NUM_ROWS))
    rig.turn(4)
    assert len(rig.said(Encoded)) == 1


def test_a_batch_of_more_bytes_than_there_are_is_made_smaller_before_it_runs(make_rig):
    one = 100 * NUM_ROWS + ITEM_BYTES
    rig = make_rig(max_call_bytes=2 * one)
    for name in "abc":
        rig.start(make_item(name, NUM_ROWS), name)
    rig.prepare_all()
    rig.prepare_all()
    rig.step()
    assert [len(call) for call in rig.encoder_calls] == [2]


def test_a_batch_that_runs_out_of_memory_is_tried_again_in_halves(make_rig):
    rig = make_rig()
    rig.max_call_rows = 2 * NUM_ROWS - 1
    for name in "abc":
        rig.deliver(make_item(name, NUM_ROWS), name)
    rig.prepare_all()
    rig.prepare_all()
    rig.turn(8)
    assert [len(call) for call in rig.encoder_calls] == [3, 1, 1, 1]
    assert len(rig.said(Encoded)) == 3 and not failed(rig)


def test_a_video_that_runs_out_of_memory_is_cut_until_it_fits(make_rig):
    rig = make_rig()
    rig.max_call_rows = 3
    rig.deliver(make_video("v", 4))
    rig.turn(10)
    assert [call[0][1:] for call in rig.encoder_calls] == [(0, 4), (0, 2), (0, 1), (1, 2), (2, 3), (3, 4)]
    assert len(rig.said(Encoded)) == 1


@pytest.mark.parametrize(
    "item", [make_item("image", NUM_ROWS), make_video("video", 3)], ids=["image", "video"]
)
def test_an_item_that_does_not_fit_alone_and_uncut_fails_as_overload_and_its_neighbours_do_not(
    make_rig, item
):
    rig = make_rig()
    rig.max_call_rows = 1
    rig.deliver(make_item("small", 1), "small")
    rig.deliver(item, "large")
    rig.turn(8)
    assert failed(rig) == {"large": "OverloadedError"}
    assert "out of memory" in rig.said(Failed)[0].error.message
    assert [m.request_id for m in rig.said(Encoded)] == ["small"]


def test_an_item_that_breaks_the_encoder_fails_alone(make_rig):
    rig = make_rig()
    rig.poison.add("bad")
    for name in ("a", "bad", "c"):
        rig.deliver(make_item(name, 2), name)
    rig.prepare_all()
    rig.prepare_all()
    rig.turn(8)
    assert rig.called == ["a+bad+c", "a", "bad", "c"]
    assert failed(rig) == {"bad": "InternalError"}
    assert Counter(m.request_id for m in rig.said(Encoded)) == {"a": 1, "c": 1}


def test_a_video_that_breaks_the_encoder_in_a_later_piece_gives_everything_back(make_rig):
    rig = make_rig()
    rig.deliver(make_video("v", 12))
    rig.deliver(make_item("a", 2), "a")
    rig.step()
    rig.step()
    rig.poison.add("v")
    rig.turn(6)
    assert failed(rig) == {"r": "InternalError"} and [m.request_id for m in rig.said(Encoded)] == ["a"]
    assert rig.encoder.engine.load().held_bytes == 0 and "v" not in rig.cache


@pytest.mark.parametrize("num_rows", [4, 6])
def test_another_number_of_rows_than_promised_is_the_items_fault(make_rig, num_rows):
    rig = make_rig()
    rig.runners["encoder"].encode = lambda modality, pieces: [torch.zeros(num_rows, 1)]
    rig.deliver(make_item("a", NUM_ROWS))
    rig.turn(4)
    assert failed(rig) == {"r": "MediaError"}


@pytest.mark.parametrize(("keeps", "goes"), [((False,), True), ((True,), False), ((False, True), False)])
def test_an_item_makes_room_before_older_ones_unless_one_of_its_users_expects_it_again(make_rig, keeps, goes):
    rig = make_rig()
    for name in "ab":
        rig.deliver(make_item(name, NUM_ROWS), name)
        rig.turn(5)
    for number, keep in enumerate(keeps):
        rig.deliver(make_item("c", NUM_ROWS), f"c{number}", keep=keep)
        rig.turn(5)
    free = rig.cache.num_free_blocks * 4 - 3 * 8
    rig.deliver(make_item("large", free + 1), "large")
    rig.turn(5)
    assert ("c" not in rig.cache) == goes and ("a" in rig.cache) == goes


def test_bytes_on_their_way_are_reported(make_rig):
    rig = make_rig()
    rig.network.faults.post_polls = 3
    rig.deliver(make_item("a", NUM_ROWS))
    rig.turn(2)
    assert rig.encoder.engine.load().sending_bytes == 2 * 4 * 8  # two blocks of four rows
    rig.turn(4)
    assert rig.encoder.engine.load().sending_bytes == 0


def test_the_budget_is_halved_by_what_did_not_fit_and_comes_back_slowly():
    clock = ManualClock()
    budget = CallBudget(1000, clock)
    budget.lower(300)
    assert budget.max_bytes == 150
    budget.lower(2000)
    assert budget.max_bytes == 150
    clock.at += RECOVERY_S - 1
    assert budget.max_bytes == 150
    clock.at += 1
    assert budget.max_bytes == 300
    clock.at += 10 * RECOVERY_S
    assert budget.max_bytes == 1000


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error, is_it):
    assert is_out_of_memory(error) is is_it
