"""What a request may say of its media, and what the answer says of them."""

from __future__ import annotations

import json

import msgspec
import pytest

from cluster.types.media import FrameStrategy, MediaOptions
from router.calls import MediaNote, MediaRules
from tests.unit.api.test_app import call, chat, error_of

PARTS = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
]
MESSAGES = [{"role": "user", "content": PARTS}]


def test_options_reach_the_items_they_are_about(door):
    response = chat(
        door,
        messages=MESSAGES,
        mm_processor_kwargs={
            "min_pixels": 16, "max_pixels": 4096, "use_audio_in_video": True, "temporal_pooling": 2, "spatial_pooling": 3,
        },
        media_io_kwargs={"video": {"fps": 4, "num_frames": 8, "strategy": "keyframes"}},
    )  # fmt: skip
    assert response.status_code == 200
    image, video, sound = (source.options for source in door.calls[0].media)
    assert image == MediaOptions(min_pixels=16, max_pixels=4096, spatial_pooling=3)
    assert video == MediaOptions(16, 4096, FrameStrategy.KEYFRAMES, 4.0, 8, 8, True, 2, 3)
    assert sound == MediaOptions()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"size": {}}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 4}}, "mm_processor_kwargs.min_pixels"),
        ({"mm_processor_kwargs": {"temporal_pooling": 9}}, "mm_processor_kwargs.temporal_pooling"),
        ({"media_io_kwargs": {"video": {"fps": -1}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"strategy": "best"}}}, "media_io_kwargs.video.strategy"),
        ({"media_io_kwargs": {"video": {"min_frames": 8, "max_frames": 4}}}, "media_io_kwargs.video.min_frames"),
        ({"media_io_kwargs": {"video": {"num_frames": 8, "max_frames": 4}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"fps": 2}}, "mm_processor_kwargs": {"fps": 3}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs.image"),
        ({"max_media_tokens": 0}, "max_media_tokens"),
        ({"on_media_error": "ignore"}, "on_media_error"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_by_name(door, fields, param):
    response = chat(door, messages=MESSAGES, **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_rules_and_salt_reach_the_door(door):
    chat(door, max_media_tokens=64, exact_media=True, on_media_error="omit", cache_salt="mine")
    chat(door)
    first, second = door.calls
    assert first.media_rules == MediaRules(64, True, True) and first.cache_salt == "/mine"
    assert second.media_rules == MediaRules() and second.cache_salt == ""


def test_a_tenant_is_known_by_its_key_and_the_key_is_not_passed_on(door):
    for key in ("Bearer one", "Bearer one", "Bearer two", None):
        headers = {} if key is None else {"authorization": key}
        body = {"model": "org/demo", "messages": [{"role": "user", "content": "hi"}]}
        assert call(door, "POST", "/v1/chat/completions", json=body, headers=headers).status_code == 200
    first, again, other, nobody = (request.tenant for request in door.calls)
    assert first == again != other and nobody == ""
    assert "one" not in first


@pytest.mark.parametrize("shares_caches", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_tenants_share_caches_only_where_the_operator_allows_it(door, path, shares_caches):
    door.limits = msgspec.structs.replace(door.limits, shares_caches=shares_caches)
    asked = {"prompt": "hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    for key in ("one", "two", None):
        for salt in (None, "s", f"{'0' * 32}/s"):
            body = {"model": "org/demo", "cache_salt": salt, **asked}
            headers = {} if key is None else {"authorization": key}
            assert call(door, "POST", path, json=body, headers=headers).status_code == 200
    assert len({request.cache_salt for request in door.calls}) == (3 if shares_caches else 9)


def test_what_was_done_to_an_item_is_told_once(door):
    door.media_notes = (
        MediaNote(0, "video", "budget", 128, num_frames=8),
        MediaNote(1, "image", "error", error="item 1 (image): empty"),
    )
    told = [
        {"item": 0, "modality": "video", "reason": "budget", "num_tokens": 128, "num_frames": 8},
        {"item": 1, "modality": "image", "reason": "error", "error": "item 1 (image): empty"},
    ]
    assert chat(door).json()["media"] == told
    for options in ({}, {"stream_options": {"include_usage": True}}):
        lines = chat(door, n=2, stream=True, **options).text.strip().split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert [event["media"] for event in events if "media" in event] == [told]
        assert "media" in events[0]


def test_nothing_is_said_when_nothing_was_done(door):
    assert "media" not in chat(door).json()
    assert '"media"' not in chat(door, stream=True).text
