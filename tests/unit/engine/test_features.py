"""The feature store: which embeddings get room when, and which requests share them."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.feature_parts import GRANTED, NUM_BLOCKS, SHARED, Parts


@pytest.fixture
def parts():
    parts = Parts()
    yield parts
    parts.let_go()


def test_room_is_given_in_order_of_arrival_without_overtaking(parts):
    parts.reserve("first", 8)
    parts.reserve("large", 16)
    parts.reserve("small", 4)
    assert list(parts.grants) == [("first", 0)]
    assert parts.close("first") == [("first", 0)]
    assert list(parts.grants) == [("first", 0)], "ready rows are still needed"
    parts.store.release(("first", 0))
    assert list(parts.grants) == [("first", 0), ("large", 0)]


def test_rows_of_a_ready_item_can_be_read_from_any_place(parts):
    parts.reserve("r", 7)
    grant = parts.grants["r", 0]
    parts.memory.segments[0][list(grant.block_ids)] = torch.arange(8).view(2, 4, 1)
    parts.close("r")
    assert torch.cat(parts.store.rows(("r", 0), 0, 7)).flatten().tolist() == list(range(7))
    assert torch.cat(parts.store.rows(("r", 0), 3, 6)).flatten().tolist() == [3, 4, 5]
    assert torch.cat(parts.store.rows(("r", 0), 5, 7)).flatten().tolist() == [5, 6]


def test_rows_are_views_one_for_each_run_of_successive_blocks(parts):
    holes = parts.pool.allocate(4)
    parts.pool.free([holes[0], holes[1], holes[3]])
    parts.reserve("r", 11)
    blocks = list(parts.grants["r", 0].block_ids)
    for number, block in enumerate(blocks):
        parts.memory.segments[0][block] = torch.arange(4 * number, 4 * number + 4).view(4, 1)
    parts.close("r")
    for start in range(11):
        for end in range(start + 1, 12):
            views = parts.store.rows(("r", 0), start, end)
            assert torch.cat(views).flatten().tolist() == list(range(start, end))
            num_jumps = sum(blocks[i + 1] != blocks[i] + 1 for i in range(start // 4, (end - 1) // 4))
            assert len(views) == 1 + num_jumps
            assert all(
                view.data_ptr() == view.untyped_storage().data_ptr() + 8 * view.storage_offset()
                for view in views
            )
    parts.pool.free([holes[2]])


def test_an_item_released_before_its_embeddings_came_keeps_its_blocks_until_the_lease_closes(parts):
    parts.reserve("r", 16)
    parts.reserve("next", 4)
    parts.store.release(("r", 0))
    assert parts.transfer_engine.cancelled == [parts.grants["r", 0].lease_id]
    assert ("next", 0) not in parts.grants
    assert parts.close("r") == []
    assert ("next", 0) in parts.grants


def test_an_item_released_while_queued_is_never_granted_and_lets_others_pass(parts):
    parts.reserve("r", 12)
    parts.reserve("large", 16)
    parts.reserve("small", 4)
    parts.store.release(("large", 0))
    assert list(parts.grants) == [("r", 0), ("small", 0)]
    parts.store.release(("large", 0))


def test_room_whose_writer_gave_up_is_granted_again(parts):
    parts.reserve("r", 16)
    first = parts.grants["r", 0]
    assert parts.close("r", completed=False) == []
    assert parts.told["r", 0] == [GRANTED, GRANTED]
    assert set(parts.grants["r", 0].generations).isdisjoint(first.generations), "the blocks are others now"
    assert parts.close("r") == [("r", 0)]


@pytest.mark.parametrize("num_rows", [8, 12])
def test_an_item_whose_encoder_is_lost_moves_to_other_room_or_waits_for_its_own(parts, num_rows):
    parts.reserve("r", num_rows)
    old = parts.grants["r", 0]
    parts.store.renew(("r", 0), "an earlier one")
    assert parts.grants["r", 0] is old
    parts.store.renew(("r", 0), old.lease_id)
    has_moved = parts.grants["r", 0] is not old
    assert has_moved == (num_rows == 8)
    assert parts.transfer_engine.cancelled == ([old.lease_id] if has_moved else [])
    parts.store.close_lease(old.lease_id, completed=False)
    assert parts.told["r", 0] == [GRANTED, GRANTED]
    assert parts.close("r") == [("r", 0)]


def test_an_item_whose_encoder_is_lost_in_full_memory_gets_room_before_younger_items(parts):
    for name in ("old", "small", "other"):
        parts.reserve(name, 8 if name == "old" else 4)
    for i in range(3):
        parts.reserve(f"young{i}", 4)
    lost = parts.grants["old", 0].lease_id
    parts.store.renew(("old", 0), lost)
    assert parts.told["old", 0] == [GRANTED]
    for name in ("small", "other"):
        assert not parts.transfer_engine.cancelled and not parts.told["young0", 0]
        parts.close(name)
        parts.store.release((name, 0))
    assert parts.told["old", 0] == [GRANTED, GRANTED] and parts.transfer_engine.cancelled == [lost]
    assert not parts.told["young0", 0]
    parts.store.close_lease(lost, completed=False)
    assert parts.told["young0", 0] == parts.told["young1", 0] == [GRANTED] and not parts.told["young2", 0]


@pytest.mark.parametrize("end", ["delivered", "ended", "released"])
def test_an_item_that_waits_for_other_room_may_end_in_its_old_room(parts, end):
    parts.reserve("old", 16)
    parts.reserve("young", 4)
    parts.store.renew(("old", 0), parts.grants["old", 0].lease_id)
    if end == "released":
        parts.store.release(("old", 0), has_ended=True)
    assert parts.close("old", completed=end == "delivered") == ([("old", 0)] if end == "delivered" else [])
    assert parts.told["old", 0] == [GRANTED] * (1 + (end == "ended"))
    assert bool(parts.told["young", 0]) == (end == "released")


def test_younger_items_go_on_if_an_item_cannot_move_before_its_lease_ends(parts):
    parts.reserve("old", 12)
    parts.store.renew(("old", 0), parts.grants["old", 0].lease_id)
    parts.reserve("young", 4)
    assert parts.told["young", 0] == [GRANTED]


def test_the_loss_of_an_encoder_that_has_delivered_or_was_never_told_where_changes_nothing(parts):
    parts.reserve("r", 4)
    parts.reserve("large", 16)
    share(parts, "a")
    lease_id = parts.grants["r", 0].lease_id
    parts.close("r")
    for key in (("r", 0), ("large", 0), ("a", 0), ("unknown", 0)):
        for name in (lease_id, ""):
            parts.store.renew(key, name)
    assert parts.told["r", 0] == [GRANTED] and parts.told["large", 0] == []


def share(parts, *request_ids, num_rows=4):
    for request_id in request_ids:
        parts.reserve(request_id, num_rows, media_hash="same")


def test_requests_with_one_item_share_one_reservation_and_one_transfer(parts):
    share(parts, "a", "b", "c", num_rows=8)
    assert parts.told == {("a", 0): [GRANTED], ("b", 0): [SHARED], ("c", 0): [SHARED]}
    assert parts.store.num_used_blocks == 2 and len(parts.transfer_engine.granted) == 1
    assert parts.store.ready_items("b", 1) == set()
    assert parts.close("a") == [("a", 0), ("b", 0), ("c", 0)]
    assert parts.store.ready_items("b", 1) == {0}


def test_an_item_that_is_here_already_is_ready_at_once(parts):
    share(parts, "a")
    parts.memory.segments[0][list(parts.grants["a", 0].block_ids)] = 7
    parts.close("a")
    share(parts, "late")
    parts.store.release(("a", 0))
    assert parts.told["late", 0] == [SHARED] and parts.store.ready_items("late", 1) == {0}
    assert torch.cat(parts.store.rows(("late", 0), 0, 4)).flatten().tolist() == [7] * 4


def test_one_item_twice_in_a_prompt_has_one_copy(parts):
    parts.reserve("r", 4, 0, "same")
    parts.reserve("r", 4, 1, "same")
    assert parts.told["r", 1] == [SHARED]
    assert parts.close("r") == [("r", 0), ("r", 1)]
    parts.store.release(("r", 0))
    assert parts.store.ready_items("r", 2) == {1}


@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_the_copy_lives_as_long_as_a_consumer_wants_it(parts, order):
    share(parts, *"abc")
    parts.close("a")
    for name in order:
        assert parts.store.num_used_blocks == 1
        parts.store.release((name, 0))
        parts.store.release((name, 0))
    assert parts.store.num_used_blocks == 0


def test_a_copy_without_consumers_is_not_shared(parts):
    share(parts, "a")
    parts.store.release(("a", 0))
    share(parts, "b")
    assert parts.told["b", 0] == [GRANTED]
    parts.close("a")
    assert parts.close("b") == [("b", 0)]


def test_other_rows_or_other_content_are_other_items(parts):
    share(parts, "a", num_rows=4)
    share(parts, "b", num_rows=5)
    parts.reserve("c", 4, media_hash="other")
    assert list(parts.told.values()) == [[GRANTED]] * 3


def test_a_lease_that_fails_goes_to_its_owner_again_and_to_the_next_when_that_one_leaves(parts):
    share(parts, *"abc", num_rows=16)
    parts.close("a", completed=False)
    assert parts.told["a", 0] == [GRANTED, GRANTED] and parts.told["b", 0] == [SHARED]
    parts.store.release(("a", 0), has_ended=True)
    parts.close("a", completed=False)
    assert parts.told["b", 0] == [SHARED, GRANTED] and parts.told["c", 0] == [SHARED]
    assert parts.close("b") == [("b", 0), ("c", 0)]


def test_an_owner_that_needs_no_embeddings_leaves_its_lease_to_the_others(parts):
    share(parts, "a", "b")
    parts.store.release(("a", 0))
    assert parts.transfer_engine.cancelled == [] and parts.told["b", 0] == [SHARED]
    assert parts.close("a") == [("b", 0)]


def test_when_the_lease_of_an_owner_that_left_fails_no_consumer_is_harmed(parts):
    share(parts, "a", "b", num_rows=16)
    parts.store.release(("a", 0), has_ended=True)
    assert parts.transfer_engine.cancelled == [], "there is no room to move to"
    assert parts.close("a", completed=False) == []
    assert parts.told["b", 0] == [SHARED, GRANTED]
    assert parts.close("b") == [("b", 0)]


def test_the_others_do_not_wait_for_the_encoder_of_a_cancelled_owner_if_there_is_room(parts):
    share(parts, "a", "b", num_rows=8)
    parts.store.release(("a", 0), has_ended=True)
    assert parts.transfer_engine.cancelled == [parts.grants["a", 0].lease_id]
    assert parts.told["b", 0] == [SHARED, GRANTED] and parts.store.num_used_blocks == 4
    assert parts.close("b") == [("b", 0)]
    assert parts.close("a") == [] and parts.store.num_used_blocks == 2


def test_no_request_joins_a_copy_for_which_older_ones_would_wait(parts):
    share(parts, "a", num_rows=12)
    parts.reserve("waits", 8)
    share(parts, "b", num_rows=12)
    assert parts.told["b", 0] == [] and parts.told["waits", 0] == []
    share(parts, "c", num_rows=12)
    assert parts.told["c", 0] == [SHARED], "the last one that waits can be joined"
    parts.close("a")
    parts.store.release(("a", 0))
    assert parts.told["waits", 0] == [GRANTED] and parts.told["b", 0] == []


def test_an_owner_that_leaves_while_it_waits_for_room_is_succeeded(parts):
    parts.reserve("all", 16)
    share(parts, "a", "b")
    parts.store.release(("a", 0), has_ended=True)
    parts.close("all")
    parts.store.release(("all", 0))
    assert parts.told["a", 0] == [] and parts.told["b", 0] == [SHARED, GRANTED]


def test_when_the_newest_copy_goes_an_older_one_is_found_again(parts):
    share(parts, "a", num_rows=8)
    parts.reserve("waits", 16)
    share(parts, "b", num_rows=8)
    assert parts.told["b", 0] == []
    parts.store.release(("b", 0))
    parts.store.release(("waits", 0))
    share(parts, "c", num_rows=8)
    assert parts.told["c", 0] == [SHARED]
    assert parts.close("a") == [("a", 0), ("c", 0)]


def test_an_item_that_may_be_cached_keeps_its_place_and_is_asked_for_when_it_is_wanted(parts):
    parts.reserve("cached", 12, is_wanted=False)
    parts.reserve("next", 8)
    assert not parts.told["cached", 0] and not parts.told["next", 0], "its room is taken"
    parts.store.want(("cached", 0))
    parts.store.want(("cached", 0))
    assert parts.told["cached", 0] == [GRANTED]
    parts.close("cached")
    parts.store.release(("cached", 0))
    assert parts.told["next", 0] == [GRANTED]


@pytest.mark.parametrize("is_needed", [False, True])
def test_another_request_does_not_wait_for_an_item_that_may_be_cached(parts, is_needed):
    parts.reserve("cached", 4, media_hash="m", is_wanted=False)
    parts.reserve("b", 4, media_hash="m")
    assert parts.told["b", 0] == [GRANTED] and len(parts.transfer_engine.granted) == 1
    (parts.store.want if is_needed else parts.store.release)(("cached", 0))
    assert parts.close("b") == [("cached", 0)] * is_needed + [("b", 0)]
    assert not parts.told["cached", 0]


def test_rows_that_are_made_in_the_process_need_no_lease_and_may_be_shared():
    parts, rooms = Parts(), []
    parts.store.reserve(("a", 0), "m", 4, 10.0, lambda _: None, lambda: rooms.append("a"))
    parts.reserve("b", 4, media_hash="m")
    assert rooms == ["a"] and not parts.transfer_engine.granted
    blocks = torch.arange(4).view(1, 4, 1)
    assert parts.store.deposit(("b", 0), lambda: blocks) is None  # the room is a's
    assert parts.store.deposit(("a", 0), lambda: blocks) == [("a", 0), ("b", 0)]
    for name in "ab":
        assert torch.cat(parts.store.rows((name, 0), 0, 4)).flatten().tolist() == [0, 1, 2, 3]
        parts.store.release((name, 0), has_ended=True)
    assert parts.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("why", ["asked elsewhere", "not needed", "cancelled"])
def test_room_that_is_not_filled_in_the_process_is_granted_to_another_encoder(why):
    parts, told = Parts(), []
    parts.store.reserve(("a", 0), "m", 4, 10.0, told.append, lambda: None)
    parts.reserve("b", 4, media_hash="m")
    if why == "asked elsewhere":
        parts.store.renew(("a", 0), "")
    elif why == "not needed":  # the prefix cache has the item's tokens; then the encoder is called off
        parts.store.release(("a", 0))
        parts.store.give_up(("a", 0))
    else:
        parts.store.release(("a", 0), has_ended=True)
    assert [type(message).__name__ for message in told] == [GRANTED] * (why == "asked elsewhere")
    assert (GRANTED in parts.told["b", 0]) == (why != "asked elsewhere")
    assert len(parts.transfer_engine.granted) == 1
