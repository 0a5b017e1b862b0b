"""instructor: structured output by schema, by function, and in pieces."""

from __future__ import annotations

from typing import Any

import instructor  # pyright: ignore[reportMissingImports]
import openai

from tests.conformance.clients.asking import (
    API,
    COUNT,
    DESCRIBE,
    KEY,
    LONG,
    MODEL,
    PICTURE_URI,
    Shape,
    a_shape,
    run,
)

HOW: Any = {"temperature": 0, "max_tokens": LONG}
SEE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": PICTURE_URI}},
            {"type": "text", "text": DESCRIBE},
        ],
    }
]


def client(mode: Any) -> Any:
    return instructor.from_openai(openai.AsyncOpenAI(base_url=API, api_key=KEY), mode=mode)


async def text() -> None:
    messages = [{"role": "user", "content": COUNT}]
    a_shape(
        await client(instructor.Mode.JSON_SCHEMA).create(
            model=MODEL, messages=messages, response_model=Shape, **HOW
        )
    )


async def image() -> None:
    a_shape(
        await client(instructor.Mode.JSON_SCHEMA).create(
            model=MODEL, messages=SEE, response_model=Shape, **HOW
        )
    )


async def stream() -> None:
    pieces = client(instructor.Mode.JSON_SCHEMA).create_partial(
        model=MODEL, messages=SEE, response_model=Shape, **HOW
    )
    a_shape([piece async for piece in pieces][-1])


async def structure() -> None:
    a_shape(
        await client(instructor.Mode.TOOLS_STRICT).create(
            model=MODEL, messages=SEE, response_model=Shape, **HOW
        )
    )


async def tools() -> None:
    a_shape(
        await client(instructor.Mode.TOOLS).create(model=MODEL, messages=SEE, response_model=Shape, **HOW)
    )


async def responses() -> None:
    asked = client(instructor.Mode.RESPONSES_TOOLS)
    a_shape(await asked.responses.create(model=MODEL, input="A red circle: its shape?", response_model=Shape))


if __name__ == "__main__":
    run("instructor", text, image, stream, structure, tools, responses)
