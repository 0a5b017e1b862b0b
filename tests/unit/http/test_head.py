"""HEAD: what GET answers, without a body."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi.routing import APIRoute

from router.api.app import build_api
from tests.fakes.fake_door import FakeDoor
from tests.fakes.http_server import serving
from tests.unit.api.test_client import HANG_S
from tests.unit.api.test_kept_responses import ASKED
from tests.unit.http.test_keys import ALICE, SCRAPER, World, entry

NAMES = {"response_id": "resp_0", "model_id": "org/demo", "name": "index.html"}
READ = [
    route.path_format.format(**NAMES)
    for route in build_api(FakeDoor()).routes
    if isinstance(route, APIRoute) and "GET" in (route.methods or ())
]
CHANGING = {"date", "x-request-id"}


def headers_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in CHANGING}


@pytest.mark.parametrize("path", READ)
async def test_it_has_the_status_and_headers_of_get_and_no_body(door, path):
    async with serving(door) as url, httpx.AsyncClient(base_url=url) as client:
        head, get = await client.head(path), await client.get(path)
        # nothing of a body is left in the connection
        assert (await client.get("/version")).status_code == 200
    assert head.status_code == get.status_code and not head.content
    if path != "/metrics":  # its length changes
        assert headers_of(head) == headers_of(get)


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 405), ("/nothing", 404)])
async def test_where_get_is_not_answered_it_is_not_either(door, path, status):
    async with serving(door) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.head(path)).status_code == status


async def test_it_needs_the_keys_that_get_needs():
    world = World(entry("alice", ALICE), entry("prometheus", SCRAPER, admin=True))
    for path in READ:
        for key in (None, ALICE, SCRAPER):
            statuses = [(await world.ask(method, path, key)).status_code for method in ("HEAD", "GET")]
            assert statuses[0] == statuses[1], (path, key)


async def test_at_the_stream_of_a_kept_response_it_ends_before_the_answer(door):
    door.hold_at = 1
    async with serving(door) as url, httpx.AsyncClient(base_url=url) as client, asyncio.timeout(HANG_S):
        kept = (await client.post("/v1/responses", json=ASKED)).json()["id"]
        head = await client.head(f"/v1/responses/{kept}", params={"stream": "true"})
        assert head.status_code == 200 and head.headers["content-type"].startswith("text/event-stream")
        assert (await client.get(f"/v1/responses/{kept}")).json()["status"] != "completed"
        door.may_go_on.set()
        while (await client.get(f"/v1/responses/{kept}")).json()["status"] != "completed":
            await asyncio.sleep(0.005)
