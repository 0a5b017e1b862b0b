"""Open Responses: what its compliance suite asks over HTTP (texts, roles, streams, calls, an image, several
turns), every response and event judged by the published types. The suite itself is no package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openresponses_types as types  # pyright: ignore[reportMissingImports]

from tests.conformance.clients.asking import (
    API,
    COUNT,
    COUNTED,
    DESCRIBE,
    KEY,
    MODEL,
    PICTURE_URI,
    SEEN,
    Shape,
    equal,
    run,
)

HEADERS = {"authorization": f"Bearer {KEY}"}
EVENTS = {
    next(iter(each.model_fields["type"].annotation)).value: each
    for name, each in vars(types).items()
    if name.endswith("StreamingEvent") and name != "ErrorStreamingEvent"
}
TOOL = {
    "type": "function",
    "name": "tell",
    "description": "A shape.",
    "parameters": Shape.model_json_schema(),
}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


async def answered(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        response = await client.post(
            f"{API}/responses", json={"model": MODEL, "input": [*items], "temperature": 0, **fields}
        )
    response.raise_for_status()
    return checked(response.json())


def checked(response: dict[str, Any]) -> dict[str, Any]:
    types.ResponseResource.model_validate(response)
    equal(response["status"], "completed")
    return response


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def events(*items: dict[str, Any], **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """Valid ones, in the order of their numbers; the last one has a complete response."""
    body = {"model": MODEL, "input": [*items], "temperature": 0, "stream": True, **fields}
    last: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(headers=HEADERS, timeout=60) as client,
        client.stream("POST", f"{API}/responses", json=body) as response,
    ):
        response.raise_for_status()
        number = 0
        async for line in response.aiter_lines():
            name, _, data = line.partition(": ")
            if name == "data" and data != "[DONE]":
                last = json.loads(data)
                EVENTS[last["type"]].model_validate(last)
                equal(last["sequence_number"], number)
                number += 1
                yield last
    checked(last["response"])


async def text() -> None:
    system = said("system", "You are a pirate. Always respond in pirate speak.")
    equal(text_of(await answered(said("user", COUNT))), COUNTED)
    equal(bool(text_of(await answered(system, said("user", "Say hello.")))), True)
    turns = said("user", COUNT), said("assistant", COUNTED), said("user", COUNT)
    equal(bool(text_of(await answered(*turns))), True)


async def image() -> None:
    parts = [{"type": "input_text", "text": DESCRIBE}, {"type": "input_image", "image_url": PICTURE_URI}]
    equal(text_of(await answered(said("user", parts))), SEEN)


async def stream() -> None:
    found = [event async for event in events(said("user", COUNT))]
    equal("".join(event["delta"] for event in found if event["type"].endswith("text.delta")), COUNTED)


async def tools() -> None:
    asked = {"tools": [TOOL], "tool_choice": "required"}
    (call,) = (await answered(said("user", "Tell me a shape."), **asked))["output"]
    Shape.model_validate_json(call["arguments"])
    found = [event async for event in events(said("user", "Tell me a shape."), **asked)]
    kinds = [event["type"] for event in found if "function_call" in str(event)]
    for kind in ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"):
        equal(f"response.{kind}" in kinds, True)


if __name__ == "__main__":
    run("openresponses-types", text, image, stream, tools)
