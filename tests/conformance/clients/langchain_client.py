"""langchain-openai: chat over both endpoints."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage  # pyright: ignore[reportMissingImports]
from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]
from pydantic import SecretStr

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

SEE = HumanMessage(
    [{"type": "image_url", "image_url": {"url": PICTURE_URI}}, {"type": "text", "text": DESCRIBE}]
)


def model(**more: Any) -> Any:
    return ChatOpenAI(
        base_url=API, api_key=SecretStr(KEY), model=MODEL, temperature=0, max_tokens=LONG, **more
    )


async def text() -> None:
    answer = await model().ainvoke(COUNT)
    equal(answer.content, COUNTED)
    equal(answer.usage_metadata["output_tokens"] > 0, True)


async def image() -> None:
    equal((await model().ainvoke([SEE])).content, SEEN)


async def stream() -> None:
    pieces = [piece async for piece in model(stream_usage=True).astream(COUNT)]
    equal("".join(piece.content for piece in pieces), COUNTED)
    equal(len(pieces) > 3, True)


async def structure() -> None:
    for method in ("json_schema", "function_calling"):
        a_shape(await model().with_structured_output(Shape, method=method).ainvoke([SEE]))


async def tools() -> None:
    bound = model().bind_tools([Shape], tool_choice="required", parallel_tool_calls=False)
    answer = await bound.ainvoke([SEE])
    a_shape(answer.tool_calls[0]["args"])
    result = ToolMessage("thanks", tool_call_id=answer.tool_calls[0]["id"])
    await model().ainvoke([SEE, answer, result])


async def responses() -> None:
    chat = model(use_responses_api=True)
    equal((await chat.ainvoke([SEE])).text, SEEN)
    equal("".join([piece.text async for piece in chat.astream(COUNT)]), COUNTED)
    answer = await chat.bind_tools([Shape], tool_choice="required", parallel_tool_calls=False).ainvoke([SEE])
    a_shape(answer.tool_calls[0]["args"])
    await chat.ainvoke([SEE, answer, ToolMessage("thanks", tool_call_id=answer.tool_calls[0]["id"])])


if __name__ == "__main__":
    run("langchain-openai", text, image, stream, structure, tools, responses)
