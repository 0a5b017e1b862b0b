"""pydantic-ai: agents over both endpoints."""

from __future__ import annotations

from typing import Any

from pydantic_ai import (  # pyright: ignore[reportMissingImports]
    Agent,
    BinaryContent,
    NativeOutput,
    ToolOutput,
)
from pydantic_ai.models.openai import (  # pyright: ignore[reportMissingImports]
    OpenAIChatModel,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore[reportMissingImports]

from tests.conformance.clients.asking import (
    API,
    COUNT,
    COUNTED,
    DESCRIBE,
    KEY,
    LONG,
    MODEL,
    PICTURE,
    SEEN,
    Shape,
    a_shape,
    equal,
    run,
)

SEE = [BinaryContent(PICTURE, media_type="image/png"), DESCRIBE]


def agent(kind: Any = OpenAIChatModel, **more: Any) -> Any:
    provider = OpenAIProvider(base_url=API, api_key=KEY)
    return Agent(
        kind(MODEL, provider=provider), model_settings={"temperature": 0, "max_tokens": LONG}, **more
    )


async def text() -> None:
    equal((await agent().run(COUNT)).output, COUNTED)


async def image() -> None:
    equal((await agent().run(SEE)).output, SEEN)


async def stream() -> None:
    async with agent().run_stream(COUNT) as answer:
        equal("".join([piece async for piece in answer.stream_text(delta=True)]), COUNTED)


async def structure() -> None:
    a_shape((await agent(output_type=NativeOutput(Shape)).run(SEE)).output)


async def tools() -> None:
    """Its own way to structured output is a function that must be called."""
    a_shape((await agent(output_type=ToolOutput(Shape)).run(SEE)).output)


async def responses() -> None:
    equal((await agent(OpenAIResponsesModel).run(SEE)).output, SEEN)
    a_shape((await agent(OpenAIResponsesModel, output_type=ToolOutput(Shape)).run(SEE)).output)
    a_shape((await agent(OpenAIResponsesModel, output_type=NativeOutput(Shape)).run(SEE)).output)


if __name__ == "__main__":
    run("pydantic-ai-slim", text, image, stream, structure, tools, responses)
