"""A client of a whole cluster that sends media: its parts, its questions, and what it requires of every
answer and refusal."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np

from bench.workload import Answer, Case, data_uri, png_bytes
from cluster.config.settings import MediaArgs
from deploy.demo_model.training import data
from deploy.demo_model.training.media import mp4_bytes
from router.api.app import build_api
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_law import MAX_TOKENS, cluster_args

QUESTION = {"type": "text", "text": "What do you see?"}
Part = dict[str, Any]


@asynccontextmanager
async def serving(
    max_batch_tokens: int = 256, max_model_len: int = 0, lets_all_in: bool = False, **media: Any
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """`media`: the door's settings of that name."""
    args = cluster_args(max_batch_tokens)
    door = args.door.model_copy(update={"media": MediaArgs.model_validate(media)})
    args = args.model_copy(update={"max_model_len": max_model_len, "door": door})
    async with local_cluster(let_all_in(args) if lets_all_in else args) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield cluster, client


def part(kind: str, url: str) -> Part:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def picture(seed: int, height: int = 128, width: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def picture_part(seed: int, height: int = 128, width: int = 128) -> Part:
    """64 rows, if it is not smaller."""
    return part("image", data_uri("image/png", png_bytes(picture(seed, height, width))))


def clip_frames(num_frames: int, seed: int = 1) -> np.ndarray:
    return data.make_video(random.Random(seed), num_frames=num_frames)[0]


def clip_part(num_frames: int, seed: int = 1) -> Part:
    """64 x 64 at 4 frames a second, each of which is taken: 16 rows for two of them, if there are 8 at
    least."""
    return part(
        "video", data_uri("video/mp4", mp4_bytes(clip_frames(num_frames, seed)))
    )  # another file each second


async def post(client: httpx.AsyncClient, parts: list[Part], **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    body = {"model": "demo", "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def ask(client: httpx.AsyncClient, parts: list[Part], **fields: Any) -> dict[str, Any]:
    response = await post(client, parts, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, parts: list[Part], **fields: Any) -> dict[str, Any]:
    """OpenAI's error object of a 400."""
    response = await post(client, parts, **fields)
    assert response.status_code == 400, response.text
    (name, error), *rest = response.json().items()
    assert name == "error" and not rest
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return error


def text_of(got: dict[str, Any]) -> str:
    return got["choices"][0]["message"]["content"]


def num_prompt_tokens(got: dict[str, Any]) -> int:
    return got["usage"]["prompt_tokens"]


def num_cached_tokens(got: dict[str, Any]) -> int:
    return got["usage"]["prompt_tokens_details"]["cached_tokens"]


def check(got: dict[str, Any], expected: Answer) -> None:
    assert text_of(got) == expected.text
    assert num_prompt_tokens(got) == expected.num_prompt_tokens
    assert got["usage"]["completion_tokens"] == len(expected.token_ids)


def asked(*media: Part, **arrays: Any) -> Case:
    """The case of these parts and the question, for the reference."""
    return Case("", [{"role": "user", "content": [*media, QUESTION]}], **arrays)


def notes_of(got: dict[str, Any]) -> list[dict[str, Any]]:
    return got.get("media", [])
