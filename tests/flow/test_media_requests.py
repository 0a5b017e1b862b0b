"""Where media lies and how it is looked at, as clients say it over HTTP. Answers are those of transformers;
refusals have OpenAI's form and hold nothing."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import MutableMapping
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from bench.media_files import image, scenes, video_of
from bench.workload import data_uri, make_case, png_bytes, wav_bytes
from deploy.demo_model.training import data
from deploy.demo_model.training.media import decode_mp4, mp4_bytes
from router.api.app import build_api
from tests.contract.fetch_host import MediaHost, Request, answer, redirect
from tests.contract.fetching import drip_body
from tests.fakes.slow_params import often
from tests.flow.local_cluster import HANG_S, LocalCluster
from tests.flow.media_client import (
    Part,
    ask,
    asked,
    check,
    clip_frames,
    clip_part,
    num_prompt_tokens,
    part,
    picture,
    picture_part,
    refusal,
    serving,
    text_of,
)
from tests.flow.media_reference import MediaReference
from tests.flow.test_law import MAX_TOKENS, MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def reference() -> MediaReference:
    return MediaReference(MODEL)


def icon(seed: int) -> tuple[bytes, np.ndarray]:
    """A circle on a transparent ground, and what is seen of it: a circle on white. Below the transparency is
    noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (128, 128, 4), dtype=np.uint8)
    rows, columns = np.ogrid[:128, :128]
    is_circle = (rows - 64) ** 2 + (columns - 64) ** 2 < 40**2
    pixels[is_circle] = (0, 0, 255, 255)
    pixels[~is_circle, 3] = 0
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue(), np.where(is_circle[..., None], pixels[..., :3], np.uint8(255))


async def test_a_transparent_picture_is_answered_as_generate_does_what_is_seen_of_it(served, reference):
    _, client = served
    for seed in range(2):
        file, seen = icon(seed)
        item = part("image", data_uri("image/png", file))
        got = await ask(client, [item])
        check(got, reference.answer(asked(item, images=(seen,)), MAX_TOKENS))
        opaque = part("image", data_uri("image/png", png_bytes(seen)))
        assert text_of(await ask(client, [opaque])) == text_of(got)


# Where it lies


async def test_media_by_url_is_answered_as_by_data_uri(reference):
    clip, samples = mp4_bytes(clip_frames(6)), make_case(random.Random(2), "audio").sounds[0]
    files = {
        "image": ("image/png", png_bytes(picture(1))),
        "video": ("video/mp4", clip),
        "audio": ("audio/wav", wav_bytes(samples)),
    }
    sound = {"type": "input_audio", "input_audio": {}}  # as the reference knows it
    cases = {
        "image": asked(part("image", ""), images=(picture(1),)),
        "video": asked(part("video", ""), videos=(decode_mp4(clip),)),
        "audio": asked(sound, sounds=(samples,)),
    }
    handlers = {f"/{kind}": answer(file) for kind, (_, file) in files.items()}
    async with MediaHost(handlers) as host, serving(fetch={"internal_hosts": [host.at]}) as (cluster, client):
        for kind, (media_type, file) in files.items():
            expected = reference.answer(cases[kind], MAX_TOKENS)
            check(await ask(client, [part(kind, host.url(f"/{kind}"))]), expected)
            check(await ask(client, [part(kind, data_uri(media_type, file))]), expected)
        assert cluster.encoders[0].encoder.engine.load().encoded.num_encoded == 3, "the same item, both ways"


async def test_what_cannot_be_fetched_is_refused_by_name_and_leaves_nothing_open():
    async with MediaHost() as host, MediaHost() as private:
        private.handlers["/"] = answer(image())
        host.handlers |= {
            "/inward": redirect(private.url("/")),
            "/metadata": redirect("http://169.254.169.254/latest"),
            "/drip": drip_body,
        }
        fetch = {"internal_hosts": [host.at], "allowed_hosts": ["cdn.example"], "total_timeout_s": 0.5}
        reasons = {
            host.url("/none"): "404",
            host.url("/inward"): "https",
            host.url("/metadata"): "https",
            host.url("/drip"): "0.5 s",
            "https://elsewhere.example/a.png": "not allowed",
            "https://127.0.0.1/a.png": "not allowed",
            private.url("/"): "only https",
            "file:///etc/passwd": "only https",
        }
        async with serving(fetch=fetch) as (cluster, client):
            for url, reason in reasons.items():
                parts = [picture_part(1), part("image", url)]
                error = await refusal(client, parts)
                assert await refusal(client, parts, stream=True) == error
                assert error["code"] == "invalid_media" and error["param"] == "messages[0].content[1]"
                assert error["message"].startswith("item 1 (image): ") and reason in error["message"], error
                await cluster.audit()
            assert (
                private.num_connections == 0
                and cluster.encoders[0].encoder.engine.load().encoded.num_encoded == 0
            )
        await host.until_closed()


async def post_and_leave(
    cluster: LocalCluster, parts: list[Part], moment: asyncio.Event, stream: bool
) -> list[dict[str, Any]]:
    """As a server tells an ASGI application that its client has gone. Returns what was sent to nobody."""
    messages = [{"role": "user", "content": parts}]
    body = json.dumps({"model": "demo", "messages": messages, "stream": stream}).encode()
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": [],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        request = next(requests, None)
        if request is None:
            await moment.wait()
        return request or {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    async with asyncio.timeout(HANG_S):
        await build_api(cluster.door)(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_a_fetch_leaves_nothing_behind(stream):
    reached = asyncio.Event()

    async def endless(request: Request, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await drip_body(request, writer)

    async with (
        MediaHost({"/": endless}) as host,
        serving(fetch={"internal_hosts": [host.at]}) as (cluster, client),
    ):
        sent = await post_and_leave(cluster, [part("image", host.url("/"))], reached, stream)
        assert not sent or sent[0]["status"] == 499
        await host.until_closed()
        await cluster.audit()
        assert text_of(await ask(client, [picture_part(1)]))


# How it is looked at


LONG = 24  # tokens of an answer that does not end: what it says later depends on every embedding


@pytest.mark.parametrize(("temporal", "spatial"), often([(1, 2), (2, 1), (3, 3)], [(1, 2), (2, 1)]))
async def test_pooled_media_is_answered_as_by_generate_on_means(reference, temporal, spatial):
    rng = random.Random(4)
    odd, small = (data.make_image(rng, size)[0] for size in ((112, 144), (80, 64)))  # 7 x 9 and 5 x 4 rows
    file = mp4_bytes(data.make_video(rng, num_frames=6)[0])  # 3 x 4 x 4 rows
    frames = decode_mp4(file)
    first, second = (part("image", data_uri("image/png", png_bytes(pixels))) for pixels in (odd, small))
    clip = part("video", data_uri("video/mp4", file))
    cases = [
        asked(first, images=(odd,)),
        asked(clip, videos=(frames,)),
        asked(clip, second, images=(small,), videos=(frames,)),
        asked(first, clip, second, images=(odd, small), videos=(frames,)),
    ]
    expected = [reference.pooled(case, LONG, temporal, spatial) for case in cases]
    fields = {"max_tokens": LONG, "ignore_eos": True}
    pooling = {"temporal_pooling": temporal, "spatial_pooling": spatial}
    async with serving(max_batch_tokens=16) as (_, client):
        for _ in range(2):  # cold and warm
            for case, answered in zip(cases, expected, strict=True):
                parts = case.messages[0]["content"][:-1]
                check(await ask(client, parts, mm_processor_kwargs=pooling, **fields), answered)
        check(await ask(client, [first]), reference.answer(cases[0], MAX_TOKENS))  # the same item, not pooled


SCENES = video_of(scenes(6, 5, 7, 6), fps=4, gop_size=5)  # 24 frames


def stored_whole(file: bytes) -> list[int]:
    with av.open(io.BytesIO(file), "r") as container:
        return [idx for idx, frame in enumerate(container.decode(video=0)) if frame.key_frame]


KEYS = stored_whole(SCENES)
assert 3 < len(KEYS) < 24


CHOSEN_FRAMES = [
    ({"num_frames": 8}, range(0, 24, 3)),
    ({"fps": 2.0}, range(0, 24, 2)),
    ({"fps": 1.0, "max_frames": 4}, range(0, 24, 6)),
    ({"min_frames": 12, "fps": 0.5}, range(0, 24, 2)),
    ({"strategy": "keyframes"}, KEYS + KEYS[-1:] * (len(KEYS) % 2)),
    ({"strategy": "keyframes", "max_frames": 2}, [KEYS[0], KEYS[len(KEYS) // 2]]),
    ({"strategy": "scenes", "num_frames": 4}, [0, 6, 11, 18]),
]


async def test_the_frames_that_a_client_asks_for_are_answered_as_by_generate_on_these_frames(
    served, reference
):
    clip, decoded = part("video", data_uri("video/mp4", SCENES)), decode_mp4(SCENES)
    _, client = served
    for video, frame_idx in CHOSEN_FRAMES:
        frames = decoded[list(frame_idx)]
        expected = reference.pooled(asked(clip, videos=(frames,)), LONG, fps=video.get("fps", 2.0))
        fields = {"media_io_kwargs": {"video": video}, "max_tokens": LONG, "ignore_eos": True}
        got = await ask(client, [clip], **fields)
        assert text_of(got) == expected.text, video
        check(got, expected)


async def test_pixels_are_bounded_as_the_client_asks(served, reference):
    _, client = served
    whole = await ask(client, [picture_part(5)])
    small = await ask(client, [picture_part(5)], mm_processor_kwargs={"max_pixels": 64 * 64})
    error = await refusal(client, [picture_part(5)], mm_processor_kwargs={"min_pixels": 9, "max_pixels": 8})
    assert num_prompt_tokens(whole) - num_prompt_tokens(small) == 64 - 16
    assert error["param"] == "mm_processor_kwargs.min_pixels"


async def test_a_clip_without_sound_is_answered_by_what_is_seen(served):
    _, client = served
    seen = await ask(client, [clip_part(8)])
    heard = await ask(client, [clip_part(8)], mm_processor_kwargs={"use_audio_in_video": True})
    assert text_of(heard) == text_of(seen) and num_prompt_tokens(heard) == num_prompt_tokens(seen)


REFUSED_FIELDS = (
    {"media_io_kwargs": {"video": {"num_frames": 64}}},  # more than the model takes
    {"media_io_kwargs": {"video": {"strategy": "keyframes", "fps": 1.0}}},
)


async def test_what_cannot_be_asked_of_a_clip_is_refused(served):
    _, client = served
    for fields in REFUSED_FIELDS:
        error = await refusal(client, [clip_part(8)], **fields)
        assert error["code"] == "invalid_media" and error["message"].startswith("item 0 ("), fields
        assert error["param"] == "messages[0].content[0]"
