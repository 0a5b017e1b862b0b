"""What a client gets beside the text if it asks: log-probabilities, token ids, the usage so far."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from router import calls
from router.api.app import build_api
from tests.fakes.fake_door import FakeDoor

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
HALF = {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0, 0x9F]}


async def post(door: FakeDoor, path: str, **fields: Any) -> httpx.Response:
    transport = httpx.ASGITransport(build_api(door))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(path, json={"model": "org/demo", **fields})
    assert response.status_code == 200, response.text
    return response


async def events(door: FakeDoor, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = (await post(door, path, stream=True, **fields)).text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor()


async def test_chat_log_probabilities_have_openais_form(door):
    drawn = {"token": " wör", "logprob": -0.5, "bytes": [*" wör".encode()]}
    fields = {**CHAT, "logprobs": True, "top_logprobs": 2}
    choice = (await post(door, "/v1/chat/completions", **fields)).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(door.words) and choice["logprobs"]["refusal"] is None
    assert choice["logprobs"]["content"][1] == {**drawn, "top_logprobs": [drawn, HALF]}
    streamed = [event["choices"][0] for event in await events(door, "/v1/chat/completions", **fields)]
    told = [choice["logprobs"] for choice in streamed]
    assert told[0] is None and told[-1] is None  # the first has the role, the last the finish reason
    assert [each for logprobs in told[1:-1] for each in logprobs["content"]] == choice["logprobs"]["content"]
    plain = (await post(door, "/v1/chat/completions", **CHAT)).json()["choices"][0]
    assert plain["logprobs"] is None


async def test_completion_log_probabilities_have_openais_form(door):
    expected = {
        "tokens": ["Hello", " wör", "ld", ""],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [{word: -0.5, "bytes:\\xf0\\x9f": -9999.0} for word in door.words],
        "text_offset": [0, 5, 9, 11],
    }
    (choice,) = (await post(door, "/v1/completions", prompt="x", logprobs=2)).json()["choices"]
    assert choice["logprobs"] == expected
    streamed = [
        event["choices"][0] for event in await events(door, "/v1/completions", prompt="x", logprobs=2)
    ]
    for name, values in expected.items():
        assert [each for choice in streamed[:-1] for each in choice["logprobs"][name]] == values
    (choice,) = (await post(door, "/v1/completions", prompt="x", logprobs=0)).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {word: -0.5} for word in door.words
    ]  # the drawn token alone


async def test_token_ids_are_returned_if_the_client_wants_them(door):
    chat = (await post(door, "/v1/chat/completions", **CHAT, return_token_ids=True)).json()
    assert chat["prompt_token_ids"] == [1, 2, 3] and chat["choices"][0]["token_ids"] == [0, 1, 2, 3]
    fields = {"prompt": ["x", "y"], "return_token_ids": True}
    for choice in (await post(door, "/v1/completions", **fields)).json()["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [0, 1, 2, 3])
    first, *rest = await events(door, "/v1/chat/completions", **CHAT, return_token_ids=True)
    assert first["prompt_token_ids"] == [1, 2, 3]
    assert [token_id for event in rest[:-1] for token_id in event["choices"][0]["token_ids"]] == [0, 1, 2, 3]
    first, *rest = await events(door, "/v1/completions", prompt="x", return_token_ids=True)
    assert first["choices"][0]["prompt_token_ids"] == [1, 2, 3]


async def test_every_chunk_has_the_usage_so_far_if_the_client_wants_it(door):
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = await events(door, "/v1/chat/completions", **CHAT, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in told] == [1, 1, 2, 3, 4, 4]
    assert all(event["usage"]["prompt_tokens"] == 7 for event in told) and not told[-1]["choices"]


async def test_prompt_log_probabilities_have_vllms_form(door):
    own = {"logprob": -0.5, "rank": None, "decoded_token": "b"}
    best = {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffd"}
    told = [None, {"2": own, "9": best}, None]
    chat = (await post(door, "/v1/chat/completions", **CHAT, prompt_logprobs=1)).json()
    assert chat["prompt_logprobs"] == told
    assert "prompt_logprobs" not in (await post(door, "/v1/chat/completions", **CHAT)).json()
    fields = {"prompt": ["x", "y"], "n": 2, "prompt_logprobs": 1}
    choices = (await post(door, "/v1/completions", **fields)).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [told] * 4


@pytest.mark.parametrize(
    ("fields", "num_scored"),
    [
        ({"logprobs": 2}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"echo": False, "logprobs": 2, "prompt_logprobs": 1}, 1),
    ],
)
async def test_workers_score_a_prompt_only_if_that_is_wanted(door, fields, num_scored):
    await post(door, "/v1/completions", prompt="x", max_tokens=1, **fields)
    assert calls.num_scored(door.calls[0]) == num_scored


async def test_an_echo_without_an_answer_asks_for_one_token_and_shows_none(door):
    await post(door, "/v1/completions", prompt="x", max_tokens=0, echo=True)
    (call,) = door.calls
    assert call.echo and not call.generates and call.stop.max_tokens == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0, "echo": False}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "echo": True, "suffix": "y"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "echo": True, "best_of": 2}, "best_of"),
    ],
)
async def test_what_cannot_be_told_of_a_prompt_is_refused(door, path, fields, param):
    transport = httpx.ASGITransport(build_api(door))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(path, json={"model": "org/demo", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not door.calls
