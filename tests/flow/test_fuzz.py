"""Almost right requests against the whole cluster in one process: no internal error, the same answer
afterwards, nothing held."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from bench.fuzz.corpus import seeds
from bench.fuzz.mutator import KINDS, Mutator
from cluster.errors import RequestError
from router.api.app import build_api
from router.api.body import HARMLESS, NEUTRAL
from tests.fakes.slow_params import often
from tests.flow.local_cluster import local_cluster
from tests.flow.test_law import cluster_args
from tests.unit.api.extremes import ENDPOINTS, EXTREMES, accepted, fields, request

NUM_CASES = 240
STRIDE = 5  # every how many of a field's accepted extremes, from the first, are sent in every run
CONTROL = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "temperature": 0,
}


async def control(client: httpx.AsyncClient) -> str:
    response = await client.post("/v1/chat/completions", json=CONTROL)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def send_all(
    client: httpx.AsyncClient, requests: list[tuple[str, bytes, dict[str, str]]]
) -> Counter[int]:
    """How often each status came; none of them is the server's fault."""
    statuses: Counter[int] = Counter()
    slots = asyncio.Semaphore(8)

    async def send(path: str, body: bytes, headers: dict[str, str]) -> None:
        async with slots:
            response = await client.post(path, content=body, headers=headers)
        assert response.status_code < 500, (response.text, body[:3000])
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        statuses[response.status_code] += 1

    async with asyncio.TaskGroup() as group:
        for each in requests:
            group.create_task(send(*each))
    return statuses


async def test_mutated_requests_harm_nobody() -> None:
    mutator = Mutator(seeds("demo"), seed=15)
    kinds = [kind for kind in KINDS if kind != "wire"]
    cases = [mutator.case(number, kinds) for number in range(NUM_CASES)]
    async with local_cluster(cluster_args(256)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            before = await control(client)
            statuses = await send_all(client, [(case.path, case.body, dict(case.headers)) for case in cases])
            assert await control(client) == before
    assert statuses[200] > NUM_CASES // 10 and statuses[400] > NUM_CASES // 10


@pytest.mark.parametrize("stride", often([1, STRIDE], [STRIDE]))
async def test_extreme_values_that_are_accepted_harm_nobody(stride: int) -> None:
    """Every field of the schema at extremes that the door lets through, at all of them in the slow tests; fields
    about media beside a clip."""
    media = next(seed.body["messages"] for seed in seeds("demo") if "video_url" in str(seed.body)[:20000])
    async with local_cluster(cluster_args(256)) as cluster:
        door = cluster.door
        found = []
        for path in ("/v1/chat/completions", "/v1/completions"):
            kind = ENDPOINTS[path]
            for field in fields(kind):
                if field[0] in (*NEUTRAL, *HARMLESS):
                    continue  # never looked at
                num_accepted = 0
                for extreme in EXTREMES:
                    more: dict[str, Any] = {"model": "demo", "max_tokens": 2, "temperature": 0.5}
                    if "media" in str(field[0]) or str(field[0]).startswith("mm_"):
                        more["messages"] = media
                    more = {name: value for name, value in more.items() if field != (name,)}
                    body = request(kind, {field: extreme}, **more)
                    try:
                        accepted(path, body, door)
                    except RequestError:
                        continue
                    if num_accepted % stride == 0:
                        found.append((path, body, {}))
                    num_accepted += 1
        transport = httpx.ASGITransport(build_api(door), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            before = await control(client)
            await send_all(client, found)
            assert await control(client) == before
