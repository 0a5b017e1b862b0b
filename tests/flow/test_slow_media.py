"""Slow videos at a door: text and pictures go past them, and clients that leave take them along."""

from __future__ import annotations

import asyncio
import random

from bench.media_files import slow_video
from bench.workload import data_uri, make_case
from cluster.media.surveyors import SurveyorPool
from tests.flow.media_client import serving

NUM_FRAMES = 6000  # seconds of decoding each


def three_videos() -> dict:
    urls = [data_uri("video/mp4", slow_video(NUM_FRAMES + idx, (1280, 720))) for idx in range(3)]
    parts = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}],
        "on_media_error": "omit",
        "media_io_kwargs": {"video": {"strategy": "scenes"}},
    }


async def test_text_and_pictures_are_answered_beside_slow_videos_whose_clients_stop_them_by_leaving(
    monkeypatch,
):
    pools: list[SurveyorPool] = []
    monkeypatch.setattr("router.door.SurveyorPool", lambda: pools.append(SurveyorPool()) or pools[-1])
    picture = {"messages": make_case(random.Random(3), "image").messages}
    async with serving() as (_, client):
        (pool,) = pools

        async def ask(fields: dict) -> int:
            body = {"model": "demo", "max_tokens": 2, **fields}
            return (await client.post("/v1/chat/completions", json=body)).status_code

        slow = [asyncio.ensure_future(ask(body)) for body in [three_videos()] * 2]
        await until_busy(pool, 2)
        for body in ({"messages": [{"role": "user", "content": "hi"}]}, picture):
            assert await ask(body) == 200
            assert not any(task.done() for task in slow), "the answer came after a video"
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        await until_busy(pool, 0)
        assert await ask(picture) == 200


async def until_busy(pool: SurveyorPool, num_processes: int) -> None:
    async with asyncio.timeout(60):
        while pool.num_busy != num_processes:
            await asyncio.sleep(0.005)
