"""Two questions about the cluster alone: does a long prefill, and does an image, slow down requests for text
only?

`itl-under-video`: four text streams run. A video of 7,680 tokens is sent whose embeddings the encoder still
has, so only its prefill can disturb the streams. Compares the gaps of the streams before and during it, with
the usual chunk budget and with a budget so large that the prompt is one chunk.

`image-tax`: the same text load alone, and with one image request to nine text requests. Reports the loss of
text throughput beyond the share that the additional tokens have in all tokens, and text TTFT next to TTFT of
the text load alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.client import ChatRequest, TimedAnswer, ask, open_session
from bench.engine.measure import closed_loop, warm_up
from bench.engine.models import VISION_MODEL
from bench.engine.prompts import Message, Part, Prompts
from bench.engine.rows import Dialogue, LoadRow, image, text
from bench.engine.servers import OURS, RunningServer, Setup, make_plan, running
from deploy.simulator.results import percentile

VIDEO_FRAMES, VIDEO_SIDE, VIDEO_RATE = 60, 448, 2  # 30 steps of 256 tokens
STREAMS, STREAM_TOKENS = 4, 3000
SETTLE_TOKENS = 16  # of each stream; gaps before them do not count
QUIET_S = 6.0
VIDEO_TIMEOUT_S = 300.0
BUDGETS: dict[str, dict[str, Any]] = {
    "chunked": {},
    "unchunked": {"prefill": {"max_batch_tokens": 8192, "step_target_s": VIDEO_TIMEOUT_S}},
}
# The door's own timeout would end the video's request.
PATIENT: dict[str, Any] = {"door": {"first_token_timeout_s": VIDEO_TIMEOUT_S}}
TAX_CONCURRENCY, TAX_REQUESTS, TAX_IMAGE_EVERY = 8, 45, 9
TEXT_LOAD = text(128, 64)


@dataclass(frozen=True)
class Finding:
    """Named numbers of one special measurement."""

    measure: str
    repetition: int
    values: dict[str, float]
    failures: tuple[str, ...] = ()


def itl_under_video(setup: Setup, prompts: Prompts, repetition: int) -> Iterator[Finding]:
    """Starts the cluster twice. Blocks for minutes."""
    for name, overrides in BUDGETS.items():
        with running(make_plan(setup, OURS, VISION_MODEL, PATIENT | overrides)) as server:
            values, failures = asyncio.run(_watch_streams(server, prompts, (name, repetition)))
        yield Finding(f"itl-under-video, {name}", repetition, values, tuple(failures))


async def _watch_streams(
    server: RunningServer, prompts: Prompts, key: tuple[object, ...]
) -> tuple[dict[str, float], list[str]]:
    clip = prompts.video(VIDEO_FRAMES, VIDEO_SIDE, VIDEO_RATE, *key)
    async with open_session() as session, asyncio.timeout(VIDEO_TIMEOUT_S):
        warm = await ask(session, server.endpoint, _video_request(prompts, clip, *key, "encode"))
        streams, tasks = _start_streams(session, server, prompts, key)
        try:
            await _until_settled(streams, tasks)
            quiet_from = time.monotonic()
            await asyncio.sleep(QUIET_S)
            video = await ask(session, server.endpoint, _video_request(prompts, clip, *key, "measure"))
            still_running = sum(not task.done() for task in tasks)
            await _until_each_went_on(streams, video.ended_at)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    failures = [record.failure for record in (warm, video) if record.failure]
    if still_running < STREAMS:
        failures.append(f"{STREAMS - still_running} text streams had ended")
    quiet_s = gaps_between(streams, quiet_from, video.started_at)
    busy_s = gaps_between(streams, video.started_at, video.ended_at)
    values = {
        "video_prompt_tokens": float(video.num_prompt_tokens),
        "video_ttft_s": video.ttft_s if video.chunks_at else 0.0,
        "undisturbed_itl_p50_s": percentile(quiet_s, 0.5),
        "undisturbed_itl_p99_s": percentile(quiet_s, 0.99),
        "itl_p50_s": percentile(busy_s, 0.5),
        "itl_p99_s": percentile(busy_s, 0.99),
        "itl_max_s": max(busy_s, default=0.0),
    }
    return values, failures


def _start_streams(
    session: aiohttp.ClientSession, server: RunningServer, prompts: Prompts, key: tuple[object, ...]
) -> tuple[list[TimedAnswer], list[asyncio.Task[TimedAnswer]]]:
    records = [TimedAnswer("text") for _ in range(STREAMS)]
    requests = [
        ChatRequest([{"role": "user", "content": prompts.text(128, *key, idx)}], STREAM_TOKENS, "text")
        for idx in range(STREAMS)
    ]
    tasks = [
        asyncio.create_task(ask(session, server.endpoint, request, record))
        for request, record in zip(requests, records, strict=True)
    ]
    return records, tasks


async def _until_settled(streams: Sequence[TimedAnswer], tasks: Sequence[asyncio.Task[TimedAnswer]]) -> None:
    while any(len(stream.chunks_at) < SETTLE_TOKENS for stream in streams):
        if any(task.done() for task in tasks):
            return
        await asyncio.sleep(0.05)


async def _until_each_went_on(streams: Sequence[TimedAnswer], ended_at: float) -> None:
    """Waits for the next chunk of each stream: the gap of a stream that was blocked by the video ends only
    then.
    """
    deadline = time.monotonic() + QUIET_S
    while any(stream.chunks_at[-1] <= ended_at for stream in streams) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


def _video_request(prompts: Prompts, clip: Part, *key: object) -> ChatRequest:
    """The message begins with a text of its own, so the prefix cache has none of the clip."""
    before, after = ({"type": "text", "text": prompts.text(16, *key, place)} for place in ("before", "after"))
    message: Message = {"role": "user", "content": [before, clip, after]}
    return ChatRequest([message], 1, "video")


def gaps_between(streams: Sequence[TimedAnswer], start_at: float, end_at: float) -> list[float]:
    """Gaps that reach into [start_at, end_at)."""
    return [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.chunks_at, stream.chunks_at[1:], strict=False)
        if later > start_at and earlier < end_at
    ]


def image_tax(setup: Setup, prompts: Prompts, repetition: int) -> Iterator[Finding]:
    """Starts the cluster once. Blocks for minutes."""
    key = ("image-tax", repetition)
    row = LoadRow("image-tax", VISION_MODEL, image)
    with running(make_plan(setup, OURS, VISION_MODEL)) as server:
        warm_up(server, [row, LoadRow("text", VISION_MODEL, TEXT_LOAD)], prompts)
        alone = _timed(server, [TEXT_LOAD(prompts, (*key, "alone"), idx) for idx in range(TAX_REQUESTS)])
        both = _timed(server, with_images(prompts, (*key, "both")))
    failures = [record.failure for records, _ in (alone, both) for record in records if record.failure]
    yield Finding("image-tax", repetition, tax_values(*alone, *both), tuple(failures))


def with_images(prompts: Prompts, key: tuple[object, ...]) -> list[Dialogue]:
    """TAX_REQUESTS text dialogues, with an image after every ninth."""
    dialogues = []
    for idx in range(TAX_REQUESTS):
        dialogues.append(TEXT_LOAD(prompts, key, idx))
        if idx % TAX_IMAGE_EVERY == TAX_IMAGE_EVERY - 1:
            dialogues.append(image(prompts, key, idx))
    return dialogues


def _timed(server: RunningServer, dialogues: Sequence[Dialogue]) -> tuple[list[TimedAnswer], float]:
    started_at = time.monotonic()
    records = asyncio.run(closed_loop(server.endpoint, dialogues, TAX_CONCURRENCY))
    return records, time.monotonic() - started_at


def tax_values(
    alone: Sequence[TimedAnswer], alone_s: float, both: Sequence[TimedAnswer], both_s: float
) -> dict[str, float]:
    """What images cost a text load, from the records and wall times of the load alone and with images."""
    texts = [record for record in both if record.kind == "text"]
    rate_alone = sum(record.num_tokens for record in alone) / alone_s
    rate_both = sum(record.num_tokens for record in texts) / both_s
    num_all = sum(record.num_prompt_tokens + record.num_tokens for record in both)
    num_text = sum(record.num_prompt_tokens + record.num_tokens for record in texts)
    loss = 1 - rate_both / rate_alone if rate_alone else 0.0
    share = 1 - num_text / num_all if num_all else 0.0
    ttft_alone_s, ttft_both_s = (
        percentile([record.ttft_s for record in records if record.chunks_at], 0.5)
        for records in (alone, texts)
    )
    return {
        "text_tokens_per_s_alone": rate_alone,
        "text_tokens_per_s_with_images": rate_both,
        "loss_ratio": loss,
        "extra_tokens_ratio": share,
        "loss_beyond_share": loss - share,
        "text_ttft_p50_ratio": ttft_both_s / ttft_alone_s if ttft_alone_s else 0.0,
    }


SPECIALS: dict[str, Callable[[Setup, Prompts, int], Iterator[Finding]]] = {
    "itl-under-video": itl_under_video,
    "image-tax": image_tax,
}
