"""openai-agents: agents over both endpoints; a tool is called, and its result is part of the next turn."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (  # pyright: ignore[reportMissingImports]
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

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

SEE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": PICTURE_URI, "detail": "auto"},
            {"type": "input_text", "text": DESCRIBE},
        ],
    }
]
PAINTED: list[str] = []
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def agent(kind: Any, settings: Any = None, **more: Any) -> Any:
    model = kind(model=MODEL, openai_client=openai.AsyncOpenAI(base_url=API, api_key=KEY))
    return Agent(name="a", model=model, model_settings=settings or ModelSettings(temperature=0), **more)


async def text() -> None:
    for kind in KINDS:
        equal((await Runner.run(agent(kind), COUNT)).final_output, COUNTED)


async def image() -> None:
    for kind in KINDS:
        equal((await Runner.run(agent(kind), SEE)).final_output, SEEN)


async def stream() -> None:
    for kind in KINDS:
        running = Runner.run_streamed(agent(kind), COUNT)
        events = [event async for event in running.stream_events() if event.type == "raw_response_event"]
        deltas = [each.data.delta for each in events if each.data.type == "response.output_text.delta"]
        equal("".join(deltas), COUNTED)


async def structure() -> None:
    for kind in KINDS:
        a_shape((await Runner.run(agent(kind, output_type=Shape), SEE)).final_output)


def paint(colour: Literal["red", "blue"]) -> str:
    """Paints the shape in this colour."""
    PAINTED.append(colour)
    return "done"


async def tools() -> None:
    for kind in KINDS:
        PAINTED.clear()
        settings = ModelSettings(
            temperature=0, tool_choice="required", max_tokens=LONG, parallel_tool_calls=False
        )
        asked = agent(kind, settings, tools=[function_tool(paint)])
        answer = await Runner.run(asked, SEE, max_turns=3)
        equal((len(PAINTED), type(answer.final_output)), (1, str))


if __name__ == "__main__":
    set_tracing_disabled(True)
    run("openai-agents", text, image, stream, structure, tools)
