"""Which web pages may call a server without keys, with the headers that browsers send for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from router.api.app import build_api
from router.http.keys import Access
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import BODY, call, error_of
from tests.unit.http.test_keys import ALICE, World, entry

CHAT, SOUND = "/v1/chat/completions", "/v1/audio/transcriptions"
EVIL = "https://evil.example"


def send(door: FakeDoor, host: str = "door", **headers: str) -> httpx.Response:
    """As a browser sends a Blob without a type: no Content-Type."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return call(door, "POST", CHAT, content=json.dumps(BODY), headers={"host": host, **named})


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("localhost:8000", {"origin": EVIL, "sec_fetch_site": "cross-site"}),
        ("localhost:8000", {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"}),
        ("10.0.0.5:8000", {"origin": EVIL}),  # no browser says a site at an address without https
        ("10.0.0.5:8000", {"origin": "http://10.0.0.5:3000"}),
        ("10.0.0.5:8000", {"origin": "null"}),
        ("", {"origin": "null"}),
        ("localhost:8000", {"sec_fetch_site": "cross-site"}),
        ("evil.example:8000", {"origin": "http://evil.example:8000"}),  # its name means this server now
        ("a.local.evil.example", {"origin": "http://a.local.evil.example"}),
        ("10.0.0.5.evil.example", {"origin": "http://10.0.0.5.evil.example"}),
        ("localhost:8000", {"origin": "http://[::1"}),
    ],
)
def test_a_page_that_is_not_the_servers_own_is_refused_unread(door, host, headers):
    answer = send(door, host, **headers)
    assert answer.status_code == 403 and error_of(answer)["code"] == "foreign_page"
    assert not door.calls


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("llm.example", {"origin": "https://llm.example", "sec_fetch_site": "same-origin"}),
        ("door:8000", {"origin": "https://llm.example", "sec_fetch_site": "same-origin"}),  # behind a gateway
        *((host, {"origin": f"http://{host}"}) for host in (
            "10.0.0.5", "127.0.0.1:8000", "[::1]:8000", "localhost:8000", "gpu-box:8000", "GPU-box.local",
            "epdg.serving.svc:8000", "epdg.serving.svc.cluster.local:8000", "gpu.corp.internal",
        )),
    ],
)  # fmt: skip
def test_the_servers_own_page_may_call(door, host, headers):
    assert send(door, host, **headers).status_code == 200


@pytest.mark.parametrize("host", ["llm.example", "epdg.serving.svc", "10.1.2.3:8000", "anything", ""])
def test_programs_may_call_it_by_any_name(door, host):
    assert send(door, host).status_code == 200
    assert send(door, host, sec_fetch_mode="cors").status_code == 200  # node's fetch


@pytest.mark.parametrize("origins", [(EVIL,), ("*",)])
def test_a_page_that_is_named_may_call(door, origins):
    door.access = Access(door.access.keys, cors_origins=origins)
    assert send(door, origin=EVIL, sec_fetch_site="cross-site").status_code == 200


@pytest.mark.parametrize("path", [SOUND, CHAT, "/v1/responses/resp_0/cancel", "/nothing"])
def test_no_path_and_no_type_of_body_is_left_out(door, path):
    files = {"file": ("a.wav", b"1")}
    bodies: tuple[dict[str, Any], ...] = (
        {"data": {"model": "org/demo"}, "files": files}, {"json": BODY}, {"content": b"{}"},
    )  # fmt: skip
    for body in bodies:
        assert call(door, "POST", path, headers={"origin": EVIL}, **body).status_code == 403
    assert call(door, "DELETE", "/v1/responses/resp_0", headers={"origin": EVIL}).status_code == 403
    assert not door.calls


def test_any_page_may_ask_for_what_its_browser_does_not_let_it_read(door):
    for path in ("/", "/v1/models", "/health"):
        answer = call(door, "GET", path, headers={"origin": EVIL, "sec-fetch-site": "cross-site"})
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


async def test_with_keys_a_key_is_enough():
    world = World(entry("alice", ALICE))
    transport = httpx.ASGITransport(build_api(world.door))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        for key, status in ((ALICE, 200), ("sk-x", 401)):
            headers = {"origin": EVIL, "authorization": f"Bearer {key}"}
            assert (await client.post(CHAT, headers=headers, json=BODY)).status_code == status
