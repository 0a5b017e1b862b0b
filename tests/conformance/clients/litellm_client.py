"""litellm: chat, text completions, responses."""

from __future__ import annotations

import json
from typing import Any

import litellm  # pyright: ignore[reportMissingImports]

from tests.conformance.clients.asking import (
    API,
    COUNT,
    COUNTED,
    DESCRIBE,
    KEY,
    LONG,
    MODEL,
    PICTURE_URI,
    SEEN,
    Shape,
    a_shape,
    equal,
    run,
)

HOW: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": API,
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": LONG,
}
HELLO = [{"role": "user", "content": COUNT}]
SEE = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": PICTURE_URI}},
            {"type": "text", "text": DESCRIBE},
        ],
    }
]
TOOL = {"type": "function", "function": {"name": "shape", "parameters": Shape.model_json_schema()}}
CALLING: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


async def text() -> None:
    answer = await litellm.acompletion(messages=HELLO, **HOW)
    equal(answer.choices[0].message.content, COUNTED)
    completed = await litellm.atext_completion(prompt="Count", **(HOW | {"max_tokens": 3}))
    equal(1 <= completed.usage.completion_tokens <= 3, True)


async def image() -> None:
    answer = await litellm.acompletion(messages=SEE, **HOW)
    equal(answer.choices[0].message.content, SEEN)


async def stream() -> None:
    chunks = await litellm.acompletion(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **HOW
    )
    found = [chunk async for chunk in chunks]
    equal("".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices), COUNTED)
    equal(any(getattr(chunk, "usage", None) for chunk in found), True)


async def structure() -> None:
    answer = await litellm.acompletion(messages=SEE, response_format=Shape, **HOW)
    a_shape(json.loads(answer.choices[0].message.content))


async def tools() -> None:
    answer = await litellm.acompletion(messages=SEE, **CALLING, **HOW)
    call = answer.choices[0].message.tool_calls[0]
    a_shape(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "thanks"}
    more = await litellm.acompletion(messages=[*SEE, answer.choices[0].message, result], tools=[TOOL], **HOW)
    equal(more.choices[0].finish_reason in ("stop", "tool_calls", "length"), True)


async def responses() -> None:
    answer = await litellm.aresponses(
        input=COUNT, **{name: how for name, how in HOW.items() if name != "max_tokens"}
    )
    equal(answer.output[0].content[0].text, COUNTED)


if __name__ == "__main__":
    run("litellm", text, image, stream, structure, tools, responses)
