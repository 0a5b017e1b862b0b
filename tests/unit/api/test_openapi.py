"""`/openapi.json` says what the API takes, no more and no less."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute

from router.api.app import build_api
from router.api.openapi import ENDPOINTS
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import BODY, call
from tests.unit.http.test_keys import ALICE, World, entry

POSTS = [path for path, endpoint in ENDPOINTS.items() if endpoint.body is not None]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return call(FakeDoor(), "GET", "/openapi.json").json()


def body_of(told: dict[str, Any], path: str) -> dict[str, Any]:
    return told["paths"][path]["post"]["requestBody"]["content"]["application/json"]


def check(told: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": told["components"]}).validate(value)


def test_every_route_is_described_and_nothing_else(told, door):
    routes = [
        each for each in build_api(door).routes if isinstance(each, APIRoute) and each.include_in_schema
    ]
    served = {(route.path_format, method.lower()) for route in routes for method in route.methods or ()}
    described = {(path, method) for path, methods in told["paths"].items() for method in methods}
    assert described == {each for each in served if each[1] != "head"}
    without_body = {"/v1/responses/{response_id}/cancel"}
    assert {path for path, method in described if method == "post"} == {*POSTS, *without_body}
    assert ENDPOINTS.keys() <= told["paths"].keys()


@pytest.mark.parametrize("path", [path for path in POSTS if not ENDPOINTS[path].file])
def test_the_example_of_a_body_is_valid_and_is_answered(told, path, door):
    content = body_of(told, path)
    check(told, content["schema"], content["example"])
    assert call(door, "POST", path, json=content["example"]).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3},
        {"n": 9},
        {"max_token": 5},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        {"stream": "yes"},
        {"store": True},
        {"service_tier": "flex"},
    ],
)
def test_what_the_api_refuses_is_not_valid(told, fields, door):
    assert call(door, "POST", "/v1/chat/completions", json={**BODY, **fields}).status_code == 400
    with pytest.raises(jsonschema.ValidationError):
        check(told, body_of(told, "/v1/chat/completions")["schema"], {**BODY, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "x", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "logit_bias": None},
        {"response_format": {"type": "json_object"}, "top_logprobs": 2, "logprobs": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stop": ["a", "b"]},
    ],
)  # fmt: skip
def test_what_the_api_takes_is_valid(told, fields, door):
    assert call(door, "POST", "/v1/chat/completions", json={**BODY, **fields}).status_code == 200
    check(told, body_of(told, "/v1/chat/completions")["schema"], {**BODY, **fields})


def test_errors_are_as_they_are_described(told, door):
    for method, path in (("GET", "/nothing"), ("POST", "/v1/completions")):
        schema = told["paths"]["/v1/completions"]["post"]["responses"]["4XX"]["content"]["application/json"]
        check(told, schema["schema"], call(door, method, path).json())


async def test_paths_that_need_a_key_say_so():
    world = World(entry("alice", ALICE))
    paths = (await world.ask("GET", "/openapi.json")).json()["paths"]
    unguarded = {
        path for path, methods in paths.items() if any("security" not in each for each in methods.values())
    }
    assert unguarded == {"/health", "/ready", "/openapi.json"}
