"""The anthropic client at /v1/messages, with strict validation of all it is sent."""

from __future__ import annotations

import base64
from typing import Any

import anthropic  # pyright: ignore[reportMissingImports]

from tests.conformance.clients.asking import (
    COUNT,
    COUNTED,
    DESCRIBE,
    KEY,
    LONG,
    MODEL,
    PICTURE,
    SEEN,
    URL,
    Shape,
    a_shape,
    equal,
    run,
)

SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()}
IMAGE: Any = [{"type": "image", "source": SOURCE}, {"type": "text", "text": DESCRIBE}]
SCHEMA: Any = Shape.model_json_schema()
TOOL: Any = {"name": "draw", "description": "Draws a shape.", "input_schema": SCHEMA}


def client() -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=URL, api_key=KEY, max_retries=0, timeout=60, _strict_response_validation=True
    )


async def ask(content: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    more: Any = {"max_tokens": LONG, "messages": messages, "extra_body": {"temperature": 0}, **fields}
    return await client().messages.create(model=MODEL, **more)


async def text() -> None:
    answer = await ask(COUNT, system="Answer.")
    equal((answer.content[0].text, answer.stop_reason), (COUNTED, "end_turn"))
    counted = await client().messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": COUNT}], system="Answer."
    )
    equal(counted.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens)
    cut = await ask(COUNT, stop_sequences=["5"])
    equal((cut.stop_reason, cut.stop_sequence), ("stop_sequence", "5"))


async def image() -> None:
    equal((await ask(IMAGE)).content[0].text, SEEN)


async def stream() -> None:
    messages: Any = [{"role": "user", "content": IMAGE}]
    async with client().messages.stream(
        model=MODEL, messages=messages, max_tokens=LONG, extra_body={"temperature": 0}
    ) as events:
        pieces = [piece async for piece in events.text_stream]
        final = await events.get_final_message()
    equal(("".join(pieces), final.content[0].text, final.stop_reason), (SEEN, SEEN, "end_turn"))


async def structure() -> None:
    answer = await ask(IMAGE, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    a_shape(Shape.model_validate_json(answer.content[0].text))


async def tools() -> None:
    fields: Any = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = await ask(IMAGE, **fields)
    call = answer.content[-1]
    equal((call.type, answer.stop_reason), ("tool_use", "tool_use"))
    a_shape(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [
        {"role": "user", "content": IMAGE},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    more = await client().messages.create(model=MODEL, max_tokens=LONG, messages=history, tools=[TOOL])
    equal(more.stop_reason in ("end_turn", "tool_use"), True)
    try:
        await ask(COUNT, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    except anthropic.BadRequestError as error:
        equal("tools[0].type" in error.message, True)
    else:
        raise AssertionError("a tool that only Anthropic has was accepted")


if __name__ == "__main__":
    run("anthropic", text, image, stream, structure, tools)
