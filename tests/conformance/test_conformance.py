"""A cluster's answers have OpenAI's published form: whole ones, every event of a stream, every error. Both
major versions of the openai client take them with strict validation."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from router.api.app import build_api
from tests.conformance import schemas
from tests.fakes.http_server import serving_api
from tests.flow.local_cluster import HANG_S, local_cluster
from tests.flow.test_law import cluster_args
from tests.flow.test_tools import with_tools

CHAT = {"messages": [{"role": "user", "content": "What do you see?"}]}
OPENAI_2 = Path(sys.prefix) / "openai-2"  # made by `make`; next to it, site-packages holds version 3
CLIENT = Path(__file__).with_name("client.py")
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def asked() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests of every kind, of both endpoints."""
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 2, "seed": 1, "temperature": 1},
        {"return_token_ids": True},
        {"stop": ["e"], "include_stop_str_in_output": True},
    ]
    called = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    scored = {"logprobs": True, "top_logprobs": 3, "n": 2}
    for more in (*kinds, scored, {"response_format": STRICT}, called):
        yield "/v1/chat/completions", {**CHAT, **more}
    for more in (*kinds, {"logprobs": 3, "n": 2}, {"logprobs": 0, "echo": True}):
        yield "/v1/completions", {"prompt": ["one two", "three"], **more}


def checked(path: str, answer: Any, body: dict[str, Any], *, is_event: bool = False) -> None:
    kind = {"chat": "ChatCompletionChunk" if is_event else "ChatCompletion"}.get(
        path.split("/")[2], "Completion"
    )
    if body.get("echo") and body.get("logprobs") is not None and not _tells_prompt(answer):
        body = {**body, "echo": False}  # an event behind the prompt
    schemas.check(kind, answer, is_event=is_event, is_echo=bool(body.get("echo")))


def _tells_prompt(answer: Any) -> bool:
    return any(
        (choice["logprobs"] or {"token_logprobs": [0]})["token_logprobs"][0] is None
        for choice in answer["choices"]
    )


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[str]:
    args = cluster_args(4096).model_copy(update={"model": str(model)})
    async with (
        local_cluster(args, (1, 0, 0, 1)) as cluster,
        serving_api(build_api(cluster.door)) as url,
    ):
        yield url


async def test_every_answer_event_and_error_has_the_published_form(tmp_path: Path):
    async with served(with_tools(tmp_path)) as url, httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        for (path, fields), options in itertools.product(asked(), (None, {}, USAGE)):
            body = {"model": "demo", "max_tokens": 5, "temperature": 0, **fields}
            if options is None:
                response = await client.post(path, json=body)
                assert response.status_code == 200, response.text
                checked(path, response.json(), body)
                continue
            more = {"stream_options": options} if options else {}
            response = await client.post(path, json={**body, **more, "stream": True})
            *events, done, end = response.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "") and events
            for event in events:
                checked(path, json.loads(event.removeprefix("data: ")), body, is_event=True)
        schemas.check("Model", (await client.get("/v1/models/demo")).json())
        await check_responses(client)
        await check_errors(client)
        await check_clients(url)


async def check_responses(client: httpx.AsyncClient) -> None:
    function = {"type": "function", "name": "tell", "parameters": SCHEMA}
    named = {"tool_choice": {"type": "function", "name": "tell"}, "max_output_tokens": 100}
    strict = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    for more in (
        {"instructions": "Be brief.", "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"]},
        {"tools": [{**function, "strict": True, "description": "x"}], **named, "parallel_tool_calls": False},
        {"text": {"format": strict}, "top_logprobs": 2, "max_output_tokens": 60},
    ):
        body = {
            "model": "demo",
            "input": "What do you see?",
            "max_output_tokens": 5,
            "temperature": 0,
            **more,
        }
        response = await client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        last = {"type": "response.completed", "sequence_number": 0, "response": response.json()}
        schemas.check("ResponseStreamEvent", last)
        response = await client.post("/v1/responses", json={**body, "stream": True})
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "") and events
        for event in events:
            kind, data = event.split("\n")
            found = json.loads(data.removeprefix("data: "))
            assert kind == f"event: {found['type']}"
            schemas.check("ResponseStreamEvent", found)


async def check_errors(client: httpx.AsyncClient) -> None:
    for path, body, status in (
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404),
        ("/v1/chat/completions", {**CHAT, "model": "demo", "n": 0}, 400),
        ("/v1/completions", {"model": "demo", "prompt": "a", "suffix": "b"}, 400),
        ("/v1/completions", {"model": "demo", "prompt": [], "stream": True}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/responses", {"model": "demo", "input": "x", "tools": [{"type": "web_search"}]}, 400),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == status, response.text
        ((name, error),) = response.json().items()
        assert name == "error"
        schemas.check("ErrorObject", error)


async def check_clients(url: str) -> None:
    for version, path in (("2.", str(OPENAI_2)), ("3.", "")):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(CLIENT), url, "demo", version,
            env={**os.environ, "PYTHONPATH": path}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(HANG_S):
            _, said = await process.communicate()
        assert process.returncode == 0, said.decode()


def test_the_schemas_are_those_of_the_client_that_is_installed():
    assert json.loads(schemas.COPY.read_text()) == schemas.published()


@pytest.mark.parametrize(
    "change", [{"id": 3}, {"choices": None}, {"sytem_fingerprint": "x"}, {"object": "text_completion"}]
)
def test_another_form_is_found(change):
    answer = {"id": "x", "choices": [], "created": 1, "model": "m", "object": "chat.completion"}
    schemas.check("ChatCompletion", answer)
    with pytest.raises(jsonschema.ValidationError):
        schemas.check("ChatCompletion", {**answer, **change})
