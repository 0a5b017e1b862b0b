"""Many requests with media at once: one video for all of them, a picture for each, text beside a slow
encoder."""

from __future__ import annotations

import asyncio
import base64
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import numpy as np
import pytest

from bench.workload import Case, Reference, data_uri, make_case, png_bytes
from cluster.types.media import MediaItem
from router.api.app import build_api
from tests.fakes.slow_params import often
from tests.flow.local_cluster import HANG_S, LocalCluster, let_all_in, local_cluster
from tests.flow.test_law import MAX_TOKENS, MODEL, cluster_args

NUM_CLIENTS = 100


@asynccontextmanager
async def clients(cluster: LocalCluster):
    """One for each door."""
    opened = [
        httpx.AsyncClient(transport=httpx.ASGITransport(build_api(door)), base_url="http://test", timeout=120)
        for door in cluster.doors
    ]
    try:
        yield opened
    finally:
        for client in opened:
            await client.aclose()


async def ask(client: httpx.AsyncClient, messages: list, max_tokens: int = MAX_TOKENS) -> httpx.Response:
    body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return await client.post("/v1/chat/completions", json=body)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def test_a_cold_video_that_everybody_asks_two_doors_for_is_encoded_once():
    case = make_case(random.Random(5), "video")
    answer = Reference(MODEL).answer(case, MAX_TOKENS).text
    async with (
        local_cluster(cluster_args(256), (2, 1, 1), num_doors=2) as cluster,
        clients(cluster) as (first, second),
    ):
        both = (first, second) * (NUM_CLIENTS // 2)
        responses = await asyncio.gather(*(ask(client, case.messages) for client in both))
        assert {text_of(response) for response in responses} == {answer}
        await cluster.audit()
        assert sum(encoder.encoder.engine.load().encoded.num_encoded for encoder in cluster.encoders) == 1


@pytest.mark.parametrize("where", often(["at the door", "at the encoder"], ["at the door"]))
async def test_of_a_flood_of_pictures_every_one_is_answered_or_refused_and_memory_stays_within_its_budget(
    where,
):
    """The door lets in what keeps the encoder busy. A door that lets everything in leaves it to the encoder
    to refuse, which computes nothing here until it has refused something."""
    args = cluster_args(256)
    if where == "at the encoder":
        args = let_all_in(args)
    budget = 256 * 1024
    encode = args.encode.model_copy(update={"max_queued_rows": 500, "max_prepared_bytes": budget})
    rng = np.random.default_rng(3)
    async with (
        local_cluster(args.model_copy(update={"encode": encode})) as cluster,
        clients(cluster) as (client,),
    ):
        engine = cluster.encoders[0].encoder.engine
        most = 0
        prepared = engine.preparation

        def pictures() -> Iterator[list]:
            for _ in range(NUM_CLIENTS):
                pixels = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
                url = data_uri("image/png", png_bytes(pixels))
                parts = [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What is it?"},
                ]
                yield [{"role": "user", "content": parts}]

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, prepared.held_bytes)
                await asyncio.sleep(0.001)

        has_refused, step, choose = threading.Event(), engine.step, engine.planner.choose
        if where == "at the encoder":
            engine.planner.choose = lambda calls: choose(calls) if has_refused.is_set() else iter(())
            engine.step = lambda: min(step() or 0.0, 0.001)

        async def answered(messages: list) -> httpx.Response:
            response = await ask(client, messages, 4)
            if response.status_code == 429:
                has_refused.set()
            return response

        watching = asyncio.ensure_future(watch())
        responses = await asyncio.gather(*(answered(messages) for messages in pictures()))
        watching.cancel()
        statuses = [response.status_code for response in responses]
        assert set(statuses) <= {200, 429} and len(statuses) == NUM_CLIENTS
        assert statuses.count(200) > 20 and (statuses.count(429) > 0 or where == "at the door")
        for refused in (response for response in responses if response.status_code == 429):
            assert (
                int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["code"] == "overloaded"
            )
        assert 0 < most <= 2 * budget, most  # what the two threads have in hand comes on top
        await cluster.audit()


class Gate:
    """Holds an encoder's calls, one after the other, until they are let through."""

    def __init__(self, cluster: LocalCluster):
        runner = cluster.encoders[0].encoder.engine.runner
        self._encode, runner.encode = runner.encode, self._held
        self._turns = threading.Semaphore(0)
        self.has_first = threading.Event()  # the first call is held

    def let_through(self, num_calls: int = 1) -> None:
        self._turns.release(num_calls)

    def _held(self, *args, **kwargs):
        self.has_first.set()
        assert self._turns.acquire(timeout=HANG_S)
        return self._encode(*args, **kwargs)


@contextmanager
def gate(cluster: LocalCluster) -> Iterator[Gate]:
    held = Gate(cluster)
    try:
        yield held
    finally:
        held.let_through(100)


def prepared_after(cluster: LocalCluster, image: dict, event: threading.Event) -> None:
    """Whichever file is read first is encoded first: this one is read after the event."""
    runner = cluster.encoders[0].encoder.engine.runner
    data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
    prepare = runner.prepare

    def in_order(item: MediaItem, is_wanted: Callable[[], bool] = lambda: True):
        assert item.data != data or event.wait(timeout=HANG_S)
        return prepare(item, is_wanted)

    runner.prepare = in_order


async def num_computed(cluster: LocalCluster, at_least: int) -> int:
    """Tokens of the one prompt in work, once there are so many of them."""
    async with asyncio.timeout(HANG_S):
        while True:
            for request in list(cluster.prefills[0].engine.requests.values()):
                if request.sequences and request.main.num_computed_tokens >= at_least:
                    return request.main.num_computed_tokens
            await asyncio.sleep(0.002)


async def test_prefill_computes_what_stands_before_each_image_while_the_image_is_encoded(monkeypatch):
    """So the time to the first token is the longer of the two, not their sum, and a second image is encoded
    while what follows the first is computed."""
    case = make_case(random.Random(8), "two images")
    content = case.messages[0]["content"]
    images = [part for part in content if part["type"] == "image_url"]
    rest = [part for part in content if part["type"] != "image_url"]
    before, between = ({"type": "text", "text": word * 20} for word in ("red circle ", "blue square "))
    messages = [{"role": "user", "content": [before, images[0], between, images[1], *rest]}]
    asked = Case("two images", messages, case.images)
    answer = Reference(MODEL).answer(asked, MAX_TOKENS).text
    args = cluster_args(16)
    one_by_one = args.encode.model_copy(update={"max_batch_items": 1})
    async with (
        local_cluster(args.model_copy(update={"encode": one_by_one})) as cluster,
        clients(cluster) as (client,),
    ):
        # else what steps took so far decides
        monkeypatch.setattr("cluster.engine.planner.is_left_for_item", lambda *seconds: False)
        with gate(cluster) as held:
            prepared_after(cluster, images[1], held.has_first)
            task = asyncio.ensure_future(ask(client, messages))
            async with asyncio.timeout(HANG_S):
                while not any(
                    known.sequences for known in list(cluster.prefills[0].engine.requests.values())
                ):
                    await asyncio.sleep(0.002)
            (request,) = cluster.prefills[0].engine.requests.values()
            first, second = request.main.prompt.media
            assert first.offset > 20 and second.offset > first.end + 20
            assert await num_computed(cluster, first.offset) == first.offset
            held.let_through()
            assert await num_computed(cluster, second.offset) == second.offset
            assert not task.done()
            held.let_through()
            assert text_of(await task) == answer
