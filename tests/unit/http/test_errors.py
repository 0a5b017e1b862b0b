"""Every error is OpenAI's object with a code, and names the field at fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.errors import (
    ContextLengthError,
    InternalError,
    MediaError,
    OverloadedError,
    QuarantinedError,
    UnavailableError,
)
from router.api.app import build_api
from router.http.limits import ClientTimeouts
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import BODY, call, error_of
from tests.unit.http.test_bodies import SCOPE, respond
from tests.unit.http.test_keys import ALICE, SCRAPER, World, entry

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TEXT = {"model": "org/demo", "prompt": "hi"}
REQUEST, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


@pytest.mark.parametrize(
    ("method", "path", "given", "status", "kind", "code", "param"),
    [
        ("POST", CHAT, {"content": b"{"}, 400, REQUEST, "invalid_value", None),
        ("POST", CHAT, {"json": {**BODY, "n": 0}}, 400, REQUEST, "invalid_value", "n"),
        ("POST", CHAT, {"json": {**BODY, "store": True}}, 400, REQUEST, "unsupported_parameter", "store"),
        ("POST", COMPLETE, {"json": {**TEXT, "messages": []}}, 400, REQUEST, "invalid_value", "messages"),
        ("POST", CHAT, {"json": {**BODY, "model": "x"}}, 404, REQUEST, "model_not_found", "model"),
        ("GET", "/v1/models/x", {}, 404, REQUEST, "model_not_found", "model"),
        ("POST", "/v1/nothing", {"json": {}}, 404, REQUEST, "not_found", None),
        ("PUT", CHAT, {"json": {}}, 405, REQUEST, "method_not_allowed", None),
        ("POST", CHAT, {"content": b" " * (5 << 20)}, 413, REQUEST, "request_too_large", None),
        ("POST", CHAT, {"data": {"a": "b"}}, 415, REQUEST, "unsupported_media_type", None),
        ("POST", CHAT, {"files": {"a": b"b"}}, 415, REQUEST, "unsupported_media_type", None),
        ("POST", "/tokenize", {"content": b"{}", "headers": {"content-encoding": "gzip"}}, 415, REQUEST,
         "unsupported_media_type", None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_told(door, method, path, given, status, kind, code, param):
    response = call(door, method, path, **given)
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, param)
    assert not door.calls and response.headers["content-type"] == "application/json"
    assert status != 405 or response.headers["allow"] == "POST"


def test_the_allow_header_names_the_methods_of_all_routes_to_a_path(door):
    assert call(door, "PUT", "/v1/responses/resp_1").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json", ""]
)
def test_json_has_several_names(door, kind):
    content = json.dumps(BODY).encode()
    assert call(door, "POST", CHAT, content=content, headers={"content-type": kind}).status_code == 200


def test_a_slow_body_is_told(door):
    status, headers, body = asyncio.run(respond(door, iter([b"{"]), ClientTimeouts(body_s=0.01), stalls=True))
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"], error["param"]) == (408, REQUEST, "request_timeout", None)
    assert headers["connection"] == "close"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_at", [None, 0])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (MediaError("bad", param="messages[0]"), 400, REQUEST, "invalid_media", "messages[0]"),
        (ContextLengthError("x", param="max_tokens"), 400, REQUEST, "context_length_exceeded", "max_tokens"),
        (QuarantinedError("lost", param="messages"), 422, REQUEST, "quarantined", "messages"),
        (OverloadedError("busy", retry_after_s=2.1), 429, RATE, "overloaded", None),
        (InternalError("bug"), 500, SERVER, "internal_error", None),
        (KeyError("bug"), 500, SERVER, "internal_error", None),
        (UnavailableError("lost"), 503, SERVER, "unavailable", None),
    ],
)  # fmt: skip
def test_what_went_wrong_behind_the_api_is_told(door, stream, fail_at, error, status, kind, code, param):
    door.error, door.fail_at = error, fail_at
    response = call(door, "POST", CHAT, json={**BODY, "stream": stream})
    told = error_of(response)
    assert (response.status_code, told["type"], told["code"], told["param"]) == (status, kind, code, param)
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_what_certainly_does_not_fit_is_told_in_the_words_that_clients_know(door):
    text = "x" * (door.limits.max_text_chars + 1)
    long = [{"role": "user", "content": text}]
    for path, fields in (
        (CHAT, {"messages": long}),
        (CHAT, {"messages": BODY["messages"], "max_tokens": 4097}),
        (COMPLETE, {"prompt": text}),
        (COMPLETE, {"prompt": [1] * 4097}),
        ("/v1/responses", {"input": text}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4097}),
    ):
        told = error_of(call(door, "POST", path, json={"model": "org/demo", **fields}))
        assert told["code"] == "context_length_exceeded" and told["param"] in told["message"]
        assert told["message"].startswith("This model's maximum context length is 4096 tokens. However, ")
    for messages, max_tokens, said in (
        (long, 8, "prompt is too long: 4097 tokens > 4096 maximum"),
        (BODY["messages"], 5000, "input length and `max_tokens` exceed context limit: 1 + 5000 > 4096"),
    ):
        body = {"model": "org/demo", "messages": messages, "max_tokens": max_tokens}
        assert call(door, "POST", "/v1/messages", json=body).json()["error"]["message"].startswith(said)
    assert not door.calls


@pytest.mark.parametrize("fail_at", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_has_the_endpoints_own_name(door, stream, fail_at):
    """Deep inside, where no endpoint is known, it is `messages` for both."""
    door.fail_at = fail_at
    for path, body, own in ((CHAT, BODY, "messages"), (COMPLETE, TEXT, "prompt")):
        door.error = QuarantinedError("lost", param="messages")
        text = call(door, "POST", path, json={**body, "stream": stream}).text
        told = text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(told)["error"]["param"] == own


@pytest.mark.parametrize("fail_at", [None, 0])
@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_input_has_its_own_name_too(door, stream, fail_at):
    door.error, door.fail_at = QuarantinedError("lost", param="messages"), fail_at
    body = {"model": "org/demo", "input": "hi", "stream": stream}
    response = call(door, "POST", "/v1/responses", json=body)
    assert (response.status_code, error_of(response)["param"]) == (422, "input")


class SlowDoor(FakeDoor):
    async def tokenize(self, call):
        await asyncio.Event().wait()
        return await super().tokenize(call)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages/count_tokens", "/tokenize"])
async def test_a_client_that_leaves_is_no_error_of_anyone(caplog, path, is_whole):
    door = SlowDoor()
    door.pause_s = 600.0
    text = {"input": "hi"} if path == "/v1/responses" else {"messages": BODY["messages"]}
    body = json.dumps({"model": "org/demo", **text}).encode()
    request = {"type": "http.request", "body": body, "more_body": not is_whole}
    received = iter([request, {"type": "http.disconnect"}])
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return next(received)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async with asyncio.timeout(60):
        await build_api(door)({**SCOPE, "path": path}, receive, send)
    assert sent[0]["status"] == 499 and not caplog.records


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("error", [UnavailableError("lost"), KeyError("secret")])
def test_an_error_in_mid_stream_is_the_last_event(door, path, error):
    door.error, door.fail_at = error, 2
    body = {**(BODY if path == CHAT else TEXT), "stream": True}
    response = call(door, "POST", path, json=body)
    *events, last, end = response.text.split("\n\n")
    assert response.status_code == 200 and end == "" and len(events) >= 2
    assert all(event.startswith("data: {") and "error" not in json.loads(event[6:]) for event in events)
    told = json.loads(last.removeprefix("data: "))
    assert told.keys() == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}
    assert told["error"]["code"] in ("unavailable", "internal_error") and "secret" not in response.text


async def test_refusals_of_keys_are_told():
    world = World(entry("alice", ALICE, requests_per_minute=1), entry("root", SCRAPER, admin=True))
    await world.chat(ALICE)
    for key, status, code in (
        (None, 401, "invalid_api_key"), (SCRAPER, 403, "insufficient_permissions"),
        (ALICE, 429, "rate_limit_exceeded"),
    ):  # fmt: skip
        response = await world.chat(key)
        assert (response.status_code, error_of(response)["code"]) == (status, code)


def test_a_wrong_parameter_of_a_query_is_named(door):
    def with_route(api: FastAPI) -> FastAPI:
        async def route(after: int) -> int:
            return after

        api.add_api_route("/numbers", route, methods=["GET"])
        return api

    response = call_api(with_route(build_api(door)), "/numbers?after=x")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", "after")


def call_api(api: FastAPI, path: str):
    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://door") as client:
            return await client.get(path)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("x" * 60_000, False),
    ],
)
def test_a_span_of_the_client_is_taken_if_it_is_one(door: FakeDoor, given, taken):
    call(door, "POST", CHAT, json=BODY, headers={"traceparent": given})
    assert getattr(door.calls[0], "trace_parent", None) == (given if taken else "")
