"""Every field of the endpoints that take JSON at its extremes: a call that workers can be sent, or a refusal
in OpenAI's form. What is taken is what `/openapi.json` says."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import RequestError
from router.calls import ChatCall, CompletionCall, TokenizeCall
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.extremes import ENDPOINTS, EXTREMES, accepted, fields, request
from tests.unit.api.test_anthropic import message_error_of
from tests.unit.api.test_app import call, error_of

# 404: the model
REFUSALS = {400: {"invalid_request_error"}, 404: {"invalid_request_error", "not_found_error"}}


def check(call_: Any, door: FakeDoor) -> None:
    """No worker stumbles over it."""
    msgspec.msgpack.encode(call_)
    if isinstance(call_, TokenizeCall):
        call_ = call_.what
    if not isinstance(call_, ChatCall | CompletionCall):
        return
    ids = [token_id for token_id in call_.stop.token_ids if token_id not in door.defaults.eos_token_ids]
    if isinstance(call_, CompletionCall):
        ids += [token_id for prompt in call_.prompts if not isinstance(prompt, str) for token_id in prompt]
    assert all(0 <= token_id < door.limits.vocab_size for token_id in ids)
    for params in call_.sampling:
        assert 0 <= params.top_k < door.limits.vocab_size and 0 <= params.seed < 2**64
        assert 0 <= params.temperature <= 2 and 0 <= params.top_p <= 1 and 0 <= params.min_p <= 1
    assert (call_.stop.max_tokens or 1) <= door.limits.max_model_len
    assert call_.stop.min_tokens <= door.limits.max_model_len


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_takes_every_extreme(door, path):
    num_accepted = num_refused = 0
    for field in fields(ENDPOINTS[path]):
        for extreme in EXTREMES:
            body = request(ENDPOINTS[path], {field: extreme}, **_model(door, field))
            try:
                check(accepted(path, body, door), door)
                num_accepted += 1
            except RequestError as error:
                assert error.param is None or error.param
                num_refused += 1
    assert num_accepted > 10 and num_refused > 50


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_several_fields_take_extremes_at_once(path, data):
    """Over HTTP: 200 or 4xx, every generation closed, and nothing taken that the document does not allow."""
    door, kind = FakeDoor(), ENDPOINTS[path]
    values = data.draw(
        st.dictionaries(st.sampled_from(fields(kind)), st.sampled_from(EXTREMES), min_size=1, max_size=4)
    )
    body = request(kind, values, model=door.models.model_id)
    response = call(door, "POST", path, content=body)
    if response.status_code == 200:
        body_schema(path).validate(json.loads(body))
    else:
        assert 400 <= response.status_code < 500
        assert (
            error_in(path)(response)["type"] in REFUSALS[response.status_code]
            and len(response.content) < 4000
        )
    assert all(generation.num_closed for generation in door.generations)


def error_in(path: str) -> Callable[[httpx.Response], dict[str, str]]:
    return message_error_of if path.startswith("/v1/messages") else error_of


@cache
def body_schema(path: str) -> jsonschema.Draft202012Validator:
    told = call(FakeDoor(), "GET", "/openapi.json").json()
    content = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return jsonschema.Draft202012Validator({**content["schema"], "components": told["components"]})


def test_nested_fields_are_found_and_stand_where_they_belong():
    kind = ENDPOINTS["/v1/chat/completions"]
    deepest = ("messages", 0, "content", 0, "input_audio", "format")
    assert deepest in fields(kind) and ("media_io_kwargs", "video", "max_frames") in fields(kind)
    body = json.loads(request(kind, {deepest: "5"}))
    part = {"type": "input_audio", "input_audio": {"data": "hi", "format": 5}}
    assert body["messages"][0]["content"] == [part]


def _model(door: FakeDoor, field: tuple[str | int, ...]) -> dict[str, str]:
    return {} if field == ("model",) else {"model": door.models.model_id}
