"""Calls of tools from the whole cluster in one process. The demo model knows simple tools. Here its chat
template is another, with tools in a form that it was not trained on, so that its calls are valid only because
they are held."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.workload import data_uri
from tests.fakes.structures import check_valid
from tests.flow.local_cluster import local_cluster
from tests.flow.test_law import MODEL, cluster_args
from tests.flow.test_structures import client_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}"
    "<|vision_bos|><|{{ c.type | upper }}|><|vision_eos|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}"
THOUGHT = "{% if thinks is defined %}<think>{{ '' if thinks else '</think>' }}{% endif %}"
QUICK = {"chat_template_kwargs": {"thinks": False}}  # or it thinks until the end of its tokens
PICTURE = data_uri("image/png", (MODEL / "examples" / "red_circle.png").read_bytes())


def tool(name: str, schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_tools(tmp_path, THOUGHT)


def with_tools(tmp_path: Path, end: str = "") -> Path:
    """The demo model with a template that shows tools as JSON. `end`: of the template."""
    return with_template(tmp_path, TOOLS + PLAIN + end)


def with_template(tmp_path: Path, template: str) -> Path:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in MODEL.iterdir():
        if file.is_file():
            shutil.copy(file, copied)
    (copied / "chat_template.jinja").write_text(template)
    return copied


def asked(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Weather?"}]
    return {
        **QUICK,
        "model": "demo",
        "messages": messages,
        "max_tokens": 150,
        "tools": [tool("weather"), tool("climate")],
        **fields,
    }


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=asked(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[list[list[str]], str]:
    """Names and arguments, and the finish reason."""
    response = await client.post("/v1/chat/completions", json=asked(stream=True, **fields))
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    calls: list[list[str]] = []
    for piece in (piece for choice in choices for piece in choice["delta"].get("tool_calls", ())):
        if "id" in piece:
            calls.append([piece["function"]["name"], ""])
        calls[piece["index"]][1] += piece["function"]["arguments"]
    return calls, choices[-1]["finish_reason"]


def calls_of(choice: dict[str, Any]) -> list[list[str]]:
    calls = choice["message"]["tool_calls"]
    return [[call["function"]["name"], call["function"]["arguments"]] for call in calls]


async def check_calls(client: httpx.AsyncClient) -> None:
    drawn = {"tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    answer = await ask(client, n=2, **drawn)
    ids = set()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        ((name, arguments),) = calls_of(choice)
        assert name in ("weather", "climate")
        check_valid(SCHEMA, arguments)
        ids |= {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 2
    calls, reason = await streamed(client, **drawn)
    assert (calls, reason) == (calls_of(answer["choices"][0]), "tool_calls")
    named = {"tool_choice": {"type": "function", "function": {"name": "climate"}}}
    answer = await ask(client, temperature=0, **named)
    assert [name for name, _ in calls_of(answer["choices"][0])] == ["climate"]
    await check_history(client, answer["choices"][0]["message"], named)
    answer = await ask(client, temperature=0, tools=[tool("weather", strict=True)])
    assert answer["choices"][0]["finish_reason"] in ("stop", "tool_calls")


async def check_history(client: httpx.AsyncClient, message: dict[str, Any], named: dict[str, Any]) -> None:
    """The call, its result and a picture are a part of the next request."""
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    turns = [{"role": "user", "content": [picture, {"type": "text", "text": "Weather?"}]}, message, result]
    plain = await ask(client, temperature=0, messages=turns[:1], **named)
    more = await ask(client, temperature=0, messages=turns, **named)
    assert calls_of(more["choices"][0])[0][0] == "climate"
    assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


async def check_json_beside_tools(client: httpx.AsyncClient) -> None:
    """Either may come, and is valid if `max_tokens` has not cut it."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields = {"response_format": schema, "temperature": 1.0, "n": 4, "parallel_tool_calls": False}
    fields["tools"] = [tool("weather", strict=True)]
    for choice in (await ask(client, seed=2, **fields))["choices"]:
        calls = choice["message"].get("tool_calls")
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        check_valid(SCHEMA, calls[0]["function"]["arguments"] if calls else choice["message"]["content"])


async def check_reasoning(client: httpx.AsyncClient) -> None:
    fields = {"chat_template_kwargs": {"thinks": True}, "temperature": 1.0, "seed": 1, "max_tokens": 6}
    answer = await ask(client, ignore_eos=True, tools=[], **fields)
    message = answer["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    answer = await ask(client, tool_choice="required", **fields)
    assert answer["choices"][0]["message"]["reasoning"]


async def check_refusals(client: httpx.AsyncClient) -> None:
    for fields, param in (
        (
            {"tools": [tool("a"), tool("b", {"not": {}}, strict=True)], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        ({"tools": [tool("a", {"x-y": 1}, strict=True)]}, "tools[0].function.parameters"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ):
        response = await client.post("/v1/chat/completions", json=asked(**fields))
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


async def test_calls_are_valid_on_every_way_and_bad_schemas_are_refused(folder):
    args = cluster_args(64).model_copy(update={"model": str(folder)})
    async with local_cluster(args) as cluster, client_of(cluster) as client:
        await check_calls(client)
        await check_json_beside_tools(client)
        await check_reasoning(client)
        await check_refusals(client)


async def test_a_model_without_tools_says_so(tmp_path: Path):
    args = cluster_args(64).model_copy(update={"model": str(with_template(tmp_path, PLAIN))})
    async with local_cluster(args) as cluster, client_of(cluster) as client:
        response = await client.post("/v1/chat/completions", json=asked(chat_template_kwargs=None))
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
        answer = await ask(client, tool_choice="none", max_tokens=3, chat_template_kwargs=None)
        assert "tool_calls" not in answer["choices"][0]["message"]
