"""Which item goes first in an encoder, and what passes between the pieces of a long item."""

import pytest
import torch

from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaGeometry, MediaItem, MediaOptions, Modality
from cluster.types.messages import Cancel, Encoded, Failed
from tests.fakes.encoder import EncoderRig
from tests.fakes.engines import DOOR
from tests.fakes.requests import item_value, make_item, make_video

ROWS_PER_S = 10.0
POLICY = SchedulingPolicy(aging_s=5.0, tokens_per_s=ROWS_PER_S, text_share=0.5)
IMAGE, VIDEO = make_item("image", 4), make_video("video", 12)  # 24 rows: three pieces of 4 frames


@pytest.fixture
def rig():
    rig = EncoderRig(cache_blocks=20, feature_blocks=20, encoder_policy=POLICY)
    yield rig
    rig.finish()


def test_a_small_image_goes_before_a_video_of_the_same_moment(rig):
    rig.deliver(VIDEO, "v")
    rig.deliver(IMAGE, "i")
    rig.prepare_all()
    rig.turn(10)
    assert rig.called == ["image", "video", "video", "video"]
    assert [m.request_id for m in rig.said(Encoded)] == ["i", "v"]


def test_items_that_came_during_a_call_go_in_the_order_in_which_their_clients_asked(rig):
    """All are looked at together; the later one had waited at its door, but less than the earlier one has
    waited here."""
    rig.deliver(make_item("early", 12), "early")
    rig.clock.at += 2.0
    rig.deliver(make_item("late", 12), "late", waited_s=1.0)
    rig.prepare_all()
    rig.turn(10)
    assert list(dict.fromkeys(rig.called)) == ["early", "late"]


def test_images_pass_between_the_pieces_of_a_video_and_its_rows_are_whole(rig):
    rig.deliver(VIDEO, "v")
    rig.step()
    for name in "abc":
        rig.deliver(make_item(name, 4), name)
        rig.step()
    rig.turn(8)
    assert rig.called == ["video", "a", "b", "c", "video", "video"]
    assert [piece for call in rig.encoder_calls for piece in call if piece[0] == "video"] == [
        ("video", 0, 4), ("video", 4, 8), ("video", 8, 12)
    ]  # fmt: skip
    rows = torch.cat(rig.features.rows(("v", 0), 0, 24))
    assert rows.flatten().tolist() == [item_value("video", row) for row in range(24)]
    assert {m.request_id for m in rig.said(Encoded)} == {"v", "a", "b", "c"}


def test_a_stream_of_images_cannot_hold_a_video_up_for_longer_than_its_size_is_worth(rig):
    rig.deliver(VIDEO, "v")
    num_images = 0
    while "v" not in [m.request_id for m in rig.said(Encoded)]:
        rig.clock.at += 0.2
        rig.start(make_item(f"image {num_images}", 4), str(num_images))
        rig.turn()
        num_images += 1
        assert rig.clock.at < 24 / ROWS_PER_S + 2, "the video starves"
    first, last = rig.called.index("video"), len(rig.called) - rig.called[::-1].index("video")
    assert last - first > 6, "nothing passes it"


def test_a_class_goes_before_the_next_and_waiting_elsewhere_counts(rig):
    rig.start(make_item("usual", 16), "a")
    rig.start(make_item("urgent", 16), "b", priority=-1)
    rig.start(make_item("resumed", 16), "c", waited_s=1.0)
    rig.start(make_item("late class", 16), "d", priority=1)
    for _ in range(4):
        rig.step()
    assert rig.called == ["urgent", "resumed", "usual", "late class"]


def test_an_item_is_as_urgent_as_the_most_urgent_of_its_deliveries(rig):
    for name in ("first", "second", "third"):
        rig.start(make_item(name, 16), name)
    rig.start(make_item("third", 16), "hurry", priority=-1)
    rig.prepare_all()
    rig.turn(4)
    assert rig.called == ["third", "first", "second"]


def test_items_of_one_request_are_encoded_in_the_order_in_which_its_prompt_needs_them(rig):
    rig.start(make_item("first", 16), "r", item_idx=0)
    rig.start(make_item("second", 4), "r", item_idx=1, num_rows_before=16)
    rig.start(make_item("other", 12), "s")
    rig.prepare_all()
    rig.turn(4)
    assert rig.called == ["other", "first", "second"]


def test_an_item_that_is_not_urgent_any_more_returns_to_its_place(rig):
    for name in ("first", "second"):
        rig.start(make_item(name, 16), name)
    rig.start(make_item("second", 16), "hurry", priority=-1)
    rig.prepare_all()
    rig.receive("encoder", Cancel("hurry"))
    rig.turn(3)
    assert rig.called == ["first", "second"]


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("how", ["cancel", "drop", "deadline"])
def test_a_video_that_is_given_up_between_its_pieces_leaves_nothing_behind(rig, num_steps, how):
    rig.deliver(VIDEO, "v")
    for _ in range(num_steps):
        rig.step()
    if how == "cancel":
        rig.receive("encoder", Cancel("v"))
    elif how == "drop":
        rig.encoder.tell(rig.encoder.engine.drop_door, DOOR)
    else:
        rig.encoder.inbox.run()
        rig.clock.at += 10.0
    rig.step()
    load = rig.encoder.engine.load()
    assert load.num_running == load.num_waiting == load.num_queued_units == load.held_bytes == 0
    assert len(rig.encoder_calls) == min(num_steps, 3)
    assert ("video" in rig.cache) == (num_steps >= 3)


def test_frames_that_become_one_row_are_not_cut_apart(rig):
    options = MediaOptions(temporal_pooling=3)
    pooled = MediaItem(Modality.VIDEO, b"", "pooled", MediaGeometry(12, (7, 4, 4)), options)
    rig.deliver(pooled, "v")
    for _ in range(4):
        rig.step()
    assert [call[0][1:] for call in rig.encoder_calls] == [(0, 3), (3, 6), (6, 7)]


def test_what_is_left_of_a_video_is_reported_as_queued(rig):
    rig.start(VIDEO, "v")
    left = []
    for _ in range(4):
        left.append(rig.encoder.engine.load().num_queued_units)
        rig.step()
    assert left == [0, 16, 8, 0] and rig.encoder.engine.load().num_used_blocks == 0


def test_a_large_item_gets_room_though_small_ones_keep_coming():
    rig = EncoderRig(cache_blocks=20, feature_blocks=200, encoder_policy=POLICY)
    rig.network.faults.post_polls = 3  # what is sent holds its room for a while
    rig.deliver(make_item("before", 8), "before")
    rig.turn(2)
    rig.start(make_item("large", 76), "large")
    num_small = 0
    while "large" not in rig.called:
        rig.deliver(make_item(f"small {num_small}", 8), str(num_small))
        rig.turn()
        rig.clock.at += 0.4
        num_small += 1
        assert rig.clock.at < 76 / ROWS_PER_S + 2, "the large item starves"
    assert num_small > 10 and not rig.said(Failed)
    rig.finish()
