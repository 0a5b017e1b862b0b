"""What stands around every answer: the request's id, what lets web pages of other origins read it, and the
state of the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

import httpx
import pytest

from cluster.errors import OverloadedError, UnavailableError
from router.api.app import build_api
from router.http.keys import Access
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import BODY, call, error_of
from tests.unit.http.test_keys import ALICE, World, entry

PAGE = "https://app.example"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("given", ["abc-1", "a" * 128, "00-4bf92f:3577/b3.4d+a6=@"])
def test_a_valid_request_id_is_told_again(door, given):
    for path in ("/health", "/nothing", "/v1/models"):
        assert call(door, "GET", path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a" * 129, "a b", 'a"', "ä", "a\tb"])
def test_any_other_request_gets_an_id_of_its_own(door, given):
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    first, second = (
        call(door, "POST", CHAT, json={**BODY, "stream": stream}, headers=headers).headers["x-request-id"]
        for stream in (False, True)
    )
    assert uuid.UUID(first) != uuid.UUID(second)


async def test_a_server_that_adds_the_id_itself_gets_none(door):
    transport = httpx.ASGITransport(build_api(door, tells_request_id=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        assert "x-request-id" not in (await client.get("/v1/models")).headers


def test_the_log_names_the_request_that_failed(door, caplog):
    door.error, door.fail_at = RuntimeError("internals"), None
    with caplog.at_level(logging.ERROR):
        answer = call(door, "POST", CHAT, json=BODY, headers={"x-request-id": "mine"})
    assert answer.status_code == 500 and "request mine failed" in caplog.text


def ask_as_page(door, method, path, origin=PAGE, **kwargs):
    return call(door, method, path, headers={"origin": origin, **kwargs.pop("headers", {})}, **kwargs)


def preflight(door, origin=PAGE, method="POST"):
    asked = "authorization, content-type, x-stainless-lang"
    headers = {"access-control-request-method": method, "access-control-request-headers": asked}
    return ask_as_page(door, "OPTIONS", CHAT, origin, headers=headers)


def test_pages_of_other_origins_may_read_nothing_by_default(door):
    assert preflight(door).status_code == 405
    answer = ask_as_page(door, "POST", CHAT, json=BODY)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_a_page_that_may_call_reads_answers_streams_and_errors(door, origins):
    door.access = Access(door.access.keys, cors_origins=origins)
    allowed = preflight(door)
    assert allowed.status_code == 200 and "authorization" in allowed.headers["access-control-allow-headers"]
    wanted = "*" if origins == ("*",) else PAGE
    answers = [ask_as_page(door, "POST", CHAT, json={**BODY, "stream": stream}) for stream in (False, True)]
    answers.append(ask_as_page(door, "GET", "/nothing"))
    door.error, door.fail_at = OverloadedError("busy"), None
    answers += [ask_as_page(door, "POST", CHAT, json={**BODY, "stream": stream}) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 429, 429]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == wanted
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    assert answers[1].text.endswith("data: [DONE]\n\n")


def test_a_page_reads_an_error_in_mid_stream(door):
    door.access = Access(door.access.keys, cors_origins=(PAGE,))
    door.error, door.fail_at = UnavailableError("decode lost"), 2
    answer = ask_as_page(door, "POST", CHAT, json={**BODY, "stream": True})
    assert answer.headers["access-control-allow-origin"] == PAGE and "decode lost" in answer.text


def test_other_pages_may_not(door):
    door.access = Access(door.access.keys, cors_origins=(PAGE,))
    for origin in ("https://evil.example", f"{PAGE}.evil.example", "null", "http://app.example"):
        assert preflight(door, origin).status_code == 400
        answer = ask_as_page(door, "POST", CHAT, origin, json=BODY)
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_asks_first_without_a_key_and_reads_that_it_has_none():
    world = World(entry("alice", ALICE))
    world.door.access = Access(world.door.access.keys, cors_origins=(PAGE,))
    world.api = build_api(world.door)
    transport = httpx.ASGITransport(world.api)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        assert (await client.options(CHAT, headers=asked)).status_code == 200
        refused = await client.post(CHAT, headers={"origin": PAGE}, json=BODY)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
    assert error_of(refused)["code"] == "invalid_api_key"


def test_a_blocked_event_loop_shows_in_the_metrics(door):
    async def blocked(self, call_):
        await asyncio.sleep(0.1)
        time.sleep(0.4)  # a tick sees at least what exceeds LAG_TICK_S
        await asyncio.sleep(0.2)
        return await FakeDoor.chat(self, call_)

    door.chat = blocked.__get__(door)

    async def main() -> str:
        transport = httpx.ASGITransport(build_api(door))
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            body = {"model": "org/demo", "messages": [{"role": "user", "content": "x"}]}
            await client.post("/v1/chat/completions", json=body)
            return (await client.get("/metrics")).text

    lines = dict(line.rsplit(" ", 1) for line in asyncio.run(main()).splitlines() if line.startswith("epdg"))
    assert float(lines["epdg_door_event_loop_max_lag_seconds"]) > 0.25
