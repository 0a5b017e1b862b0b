"""API keys: which requests may pass, as which tenant, and how a changed file is taken over."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import openai
import pytest

from cluster.config.environment import read_environment
from cluster.config.keys import ApiKey, key_entry, new_key
from cluster.config.settings import AccessArgs
from cluster.errors import ConfigError, UnavailableError
from router.api.app import build_api
from router.http.keys import LOAD_PATH, LOOK_PERIOD_S, UNLOAD_PATH, Access, KeyFile, KeyRing
from tests.fakes.clock import ManualClock
from tests.fakes.fake_door import FakeDoor
from tests.fakes.http_server import serving
from tests.unit.api.test_app import BODY, error_of

ALICE, BOB, SCRAPER = "sk-alice", "sk-bob", "sk-scraper"
CHAT = "/v1/chat/completions"


class ScriptedSource(KeyFile):
    """A key file whose changes a test makes. Counts looks and reads, and notes their threads."""

    def __init__(self, *keys: ApiKey):
        self.version = 0
        self.keys: Sequence[ApiKey] = keys
        self.error: Exception | None = None
        self.num_looks = self.num_reads = 0
        self.threads: set[threading.Thread] = set()
        self.may_end = threading.Event()
        self.may_end.set()

    def change(self, *keys: ApiKey, error: Exception | None = None) -> None:
        self.version, self.keys, self.error = self.version + 1, keys, error

    def stamp(self) -> tuple[int, ...]:
        self.num_looks += 1
        self.threads.add(threading.current_thread())
        self.may_end.wait(60)
        return (self.version,)

    def read(self) -> tuple[ApiKey, ...]:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return tuple(self.keys)


def entry(name: str, key: str, **fields) -> ApiKey:
    made = key_entry(name, key)
    return ApiKey(name, made.hash, **fields)


class World:
    """A door with keys, and a clock."""

    def __init__(self, *keys: ApiKey, public_metrics: bool = False):
        self.clock = ManualClock()
        self.source = ScriptedSource(*keys)
        self.door = FakeDoor()
        ring = KeyRing(self.source, (), self.clock)
        self.door.access = Access(ring, public_metrics=public_metrics)
        self.api = build_api(self.door)

    async def ask(self, method: str, path: str, key: str | None = None, **kwargs) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await client.request(method, path, headers=headers, **kwargs)

    async def chat(self, key: str | None = None, **fields) -> httpx.Response:
        return await self.ask("POST", CHAT, key, json={**BODY, **fields})


@pytest.fixture
def world() -> World:
    return World(entry("alice", ALICE), entry("bob", BOB), entry("prometheus", SCRAPER, admin=True))


async def test_a_tenant_is_the_name_of_its_key(world):
    for key in (ALICE, BOB):
        assert (await world.chat(key)).status_code == 200
    assert [call.tenant for call in world.door.calls] == ["alice", "bob"]
    assert [call.cache_salt for call in world.door.calls] == ["alice/", "bob/"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, "Bearer sk-alic", f"Bearer {ALICE}x"]
)
@pytest.mark.parametrize("path", [CHAT, "/nothing", "/metrics", LOAD_PATH, "/health/", "/health/x"])
async def test_a_request_without_a_valid_key_is_refused_unread(world, header, path):
    async def body():
        raise AssertionError("the body was read")
        yield b""

    transport = httpx.ASGITransport(world.api, raise_app_exceptions=False)
    headers = {} if header is None else {"authorization": header}
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        response = await client.post(path, headers=headers, content=body())
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert (error["code"], error["type"], error["param"]) == (
        "invalid_api_key",
        "invalid_request_error",
        None,
    )
    assert ALICE not in response.text and not world.door.calls


async def test_a_scheme_has_no_case(world):
    transport = httpx.ASGITransport(world.api)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        answer = await client.get("/v1/models", headers={"authorization": f"bearer  {ALICE} "})
    assert answer.status_code == 200


async def test_open_paths_need_no_key(world):
    for path in ("/health", "/ready", "/openapi.json", "/", "/page/main.js"):
        assert (await world.ask("GET", path)).status_code == 200
    assert [(await world.ask("GET", "/pools", key)).status_code for key in (None, ALICE)] == [401, 200]


@pytest.mark.parametrize("root", ["", "/v2"])
async def test_a_key_opens_the_paths_that_it_is_for(world, root):
    transport = httpx.ASGITransport(world.api, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://door{root}") as client:
        for key, path, status in (
            (ALICE, "/metrics", 403), (SCRAPER, "/metrics", 200), (SCRAPER, "/v1/models", 403),
            (ALICE, "/v1/models", 200),
        ):  # fmt: skip
            answer = await client.get(path, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
            if status == 403:
                assert error_of(answer)["code"] == "insufficient_permissions"


@pytest.mark.parametrize("public_metrics", [False, True])
async def test_adapters_are_loaded_and_unloaded_with_an_admin_key_alone(public_metrics):
    world = World(entry("alice", ALICE), entry("ops", SCRAPER, admin=True), public_metrics=public_metrics)
    body = {"lora_name": "mine", "lora_path": "folder"}
    for key, status in ((None, 401), (ALICE, 403), (SCRAPER, 200)):
        assert (await world.ask("POST", LOAD_PATH, key, json=body)).status_code == status
        assert world.door.adapters.loaded == ({"mine": "folder"} if status == 200 else {})
    for changed in ({"lora_name": ""}, {"lora_path": 3}, {"load_inplace": True}, {"lora_path": None}):
        answer = await world.ask("POST", LOAD_PATH, SCRAPER, json={**body, **changed})
        assert (answer.status_code, error_of(answer)["param"]) == (400, *changed)
    for key, status in ((ALICE, 403), (SCRAPER, 200)):
        assert (await world.ask("POST", UNLOAD_PATH, key, json={"lora_name": "mine"})).status_code == status
    assert world.door.adapters.loaded == {}


async def test_metrics_are_public_where_the_operator_says_so():
    world = World(entry("alice", ALICE), public_metrics=True)
    await world.chat("wrong")
    text = (await world.ask("GET", "/metrics")).text
    assert 'epdg_door_key_refusals_total{status="401"} 1.0' in text
    assert 'epdg_http_responses_total{status="401"} 1.0' in text
    # `rate` does not see the first count of a new series
    assert 'epdg_http_responses_total{status="503"} 0.0' in text
    assert (await world.ask("GET", "/v1/models")).status_code == 401


async def test_a_file_without_keys_opens_nothing():
    assert (await World().chat(ALICE)).status_code == 401


async def test_a_changed_file_is_taken_over_without_a_restart(world):
    world.source.change(entry("bob", BOB), entry("carol", "sk-carol"))
    assert (await world.chat(ALICE)).status_code == 200 and world.source.num_looks == 1  # not looked at yet
    world.clock.at += LOOK_PERIOD_S
    assert [(await world.chat(key)).status_code for key in (ALICE, BOB, "sk-carol")] == [401, 200, 200]
    assert (world.source.num_looks, world.source.num_reads) == (2, 2)
    assert world.source.threads - {threading.current_thread()}  # beside the event loop
    world.clock.at += LOOK_PERIOD_S
    await world.chat(BOB)
    assert (world.source.num_looks, world.source.num_reads) == (3, 2)  # it has not changed


async def test_a_file_that_cannot_be_used_changes_nothing(world):
    for error in (ConfigError("not a list"), None):
        keys = [] if error else [entry("alice", ALICE), entry("alice", BOB, admin=True)]
        world.source.change(*keys, error=error)
        world.clock.at += LOOK_PERIOD_S
        assert (await world.chat(ALICE)).status_code == 200
        assert "epdg_door_key_file_stale 1.0" in (await world.ask("GET", "/metrics", SCRAPER)).text
    world.source.change(entry("alice", ALICE))
    world.clock.at += LOOK_PERIOD_S
    assert [(await world.chat(key)).status_code for key in (ALICE, BOB)] == [200, 401]
    assert not world.door.access.keys.is_stale


async def test_requests_of_one_moment_share_one_look(world):
    world.clock.at += LOOK_PERIOD_S
    await asyncio.gather(*(world.chat(ALICE) for _ in range(10)))
    assert world.source.num_looks == 2


async def test_a_disk_that_hangs_holds_no_request_for_long(world):
    world.source.may_end.clear()
    world.clock.at += LOOK_PERIOD_S
    look = asyncio.ensure_future(world.chat(ALICE))
    while world.source.num_looks < 2:
        await asyncio.sleep(0.001)
    world.clock.at += 10.0  # the look has taken longer than its timeout
    assert (await world.chat(ALICE)).status_code == 200
    assert world.source.num_looks == 2
    world.source.may_end.set()
    assert (await look).status_code == 200


def test_keys_come_from_the_environment_too(tmp_path):
    environment = read_environment({"EPDG_API_KEY": "token-abc123", "EPDG_ADMIN_KEY": "root"})
    door = FakeDoor()
    door.access = Access.load(AccessArgs(), environment)
    statuses = [
        (key, path, status)
        for key, path, status in [
            ("token-abc123", "/v1/models", 200), ("root", "/v1/models", 403), ("root", "/metrics", 200),
            ("token-abc123", "/metrics", 403), ("other", "/v1/models", 401),
        ]
        if _status(door, path, key) != status
    ]  # fmt: skip
    assert not statuses


def test_an_admin_key_alone_guards_the_paths_of_operators():
    door = FakeDoor()
    door.access = Access.load(AccessArgs(), read_environment({"EPDG_ADMIN_KEY": "root"}))
    assert [_status(door, path, None) for path in ("/v1/models", "/metrics", "/health")] == [200, 401, 200]
    assert _status(door, "/metrics", "root") == 200


def _status(door: FakeDoor, path: str, key: str | None) -> int:
    async def main() -> int:
        transport = httpx.ASGITransport(build_api(door))
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(main())


def _write(path: Path, text: str, at: int) -> None:
    path.write_text(text)
    os.utime(path, (at, at))


@pytest.mark.parametrize("is_json", [False, True])
async def test_a_file_is_yaml_or_json_and_hashes_are_all_that_it_has(tmp_path, is_json):
    key, path, clock = new_key(), tmp_path / "keys", ManualClock()
    made = key_entry("alice", key)
    _write(path, json.dumps([{"name": "alice", "hash": made.hash}]) if is_json else made.line(), 1)
    assert key not in path.read_text()
    access = Access.load(AccessArgs(key_file=str(path)), read_environment({}), clock)
    assert access.keys.find(key.encode()) == made
    for text, at in (("", 2), (f"{made.line()}\n- {{name: x}}", 3)):  # the second one is refused
        _write(path, text, at)
        clock.at += LOOK_PERIOD_S
        await access.keys.refresh()
        assert access.keys.find(key.encode()) is None
    path.unlink()
    clock.at += LOOK_PERIOD_S
    await access.keys.refresh()
    assert access.keys.is_stale


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "keys: "),
        ("- sk-secret", "Expected `object`"),
        ("- {name: alice, key: sk-secret}", "unknown field `key`"),
        ("- {name: alice, hash: sk-secret}", "matching regex"),
        ("- {name: a/b, hash: sk-secret}", "matching regex"),
        ('- {name: alice, hash: "sha256:%s", requests_per_minute: 0}', ">= 1"),
        ('- {name: alice, hash: "sha256:%s"}\n- {name: bob, hash: "sha256:%s"}', "listed twice"),
    ],
)
def test_a_wrong_file_is_one_line_that_tells_no_key(tmp_path, text, said):
    path = tmp_path / "keys"
    path.write_text(text.replace("%s", "0" * 64))
    with pytest.raises(ConfigError) as caught:
        Access.load(AccessArgs(key_file=str(path)), read_environment({}))
    assert said in caught.value.message and "\n" not in caught.value.message
    assert "secret" not in caught.value.message


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing"):
        Access.load(AccessArgs(key_file=str(tmp_path / "nothing")), read_environment({}))


def test_openais_client_sends_its_key_and_understands_refusals(world):
    world.door.error, world.door.fail_at = UnavailableError("later"), None

    async def main() -> None:
        async with serving(world.door) as url:
            for key, expected in ((ALICE, openai.InternalServerError), ("wrong", openai.AuthenticationError),
                                  (SCRAPER, openai.PermissionDeniedError)):  # fmt: skip
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                    with pytest.raises(expected) as caught:
                        await client.chat.completions.create(**BODY)
                    assert caught.value.code

    asyncio.run(main())
    assert [call.tenant for call in world.door.calls] == ["alice"]


async def test_nothing_that_a_client_sends_is_a_label(world):
    odd = "strange-input"
    transport = httpx.ASGITransport(world.api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        for key in (odd, ALICE):
            headers = {"authorization": f"Bearer {key}", "x-request-id": odd, "traceparent": odd, odd: odd}
            for method, path in (("POST", CHAT), (odd.upper(), f"/{odd}"), ("GET", f"/v1/models/{odd}")):
                await client.request(method, path, headers=headers, json={**BODY, "model": odd})
    text = (await world.ask("GET", "/metrics", SCRAPER)).text
    assert odd not in text.lower() and "alice" not in text
