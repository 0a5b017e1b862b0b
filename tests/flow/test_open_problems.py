"""Problems that users of other systems have reported (docs/open-problems.md), tried here: where no other test
shows them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from bench.media_files import image
from bench.workload import Reference, data_uri, make_case, png_bytes
from tests.flow.local_cluster import local_cluster
from tests.flow.losses import Loss, StandIns
from tests.flow.media_client import ask, asked, check, part, picture, picture_part, post, serving
from tests.flow.test_law import MAX_TOKENS, MODEL, cluster_args
from tests.flow.test_structures import PERSON, client_of, compact
from tests.flow.test_structures import ask as ask_for_choices

NUM_BYTES = 6 << 20


async def test_images_back_to_back_are_answered_as_by_generate():
    """sglang#35799, vllm#49692: prompts with several images failed, or had other answers, where the encoder
    was apart. Here without a word between them, of different sizes, one of them twice, over two encoders."""
    sizes = [(64, 64), (96, 128), (128, 64), (64, 160)]
    pictures = [picture(seed, *size) for seed, size in enumerate(sizes)]
    shown: list[list[np.ndarray]] = [pictures[:2], pictures[:4], [pictures[0], pictures[0], pictures[3]]]
    reference = Reference(MODEL)
    async with local_cluster(cluster_args(48), (2, 1, 1)) as cluster, client_of(cluster) as client:
        for group in shown:
            parts = [part("image", data_uri("image/png", png_bytes(pixels))) for pixels in group]
            check(await ask(client, parts), reference.answer(asked(*parts, images=tuple(group)), MAX_TOKENS))


async def test_answers_under_a_schema_go_on_when_their_decode_worker_is_lost(stand_ins: StandIns):
    """dynamo#7634: a replay began the grammar at its root, and JSON was doubled. Here with choices, seeds
    and an image: the texts are those without a loss."""
    media = make_case(random.Random(5), "image").messages
    fields: list[dict[str, Any]] = [
        {
            "temperature": 1.0,
            "seed": seed,
            "n": 2,
            **compact(PERSON),
            **({"messages": media} if seed % 2 else {}),
        }
        for seed in range(4)
    ]
    async with local_cluster(cluster_args(64), (1, 1, 2)) as cluster, client_of(cluster) as client:
        wanted = [await ask_for_choices(client, **each) for each in fields]
        loss = Loss(cluster.decodes, "run", 4, stand_ins)
        got = await asyncio.gather(*(ask_for_choices(client, **each) for each in fields))
        assert loss.victim is not None and cluster.door.dispatcher.flow.continuation.num_replays > 0
        assert got == wanted


async def test_large_corrupt_images_are_refused_by_name_and_text_beside_them_answered():
    """sglang#24152: a request with a corrupt image of 6 MB did not end within an hour. Here the beginning of
    a good file, and noise behind it."""
    noise = random.Random(1).randbytes(NUM_BYTES)
    files = [image(640, 480, form)[:600] + noise for form in ("PNG", "JPEG")]
    parts = [[picture_part(1), part("image", data_uri("image/png", file))] for file in files]
    async with serving() as (_, client):
        *refused, answered = await asyncio.gather(*(post(client, each) for each in (*parts, [])))
    for response in refused:
        assert response.status_code == 400 and "item 1 (image)" in response.json()["error"]["message"]
    assert answered.status_code == 200
