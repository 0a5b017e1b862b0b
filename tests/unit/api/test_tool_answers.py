"""Calls and reasoning in answers and events, as the openai client reads them, with strict validation."""

from __future__ import annotations

import json

import openai
import pydantic

from router.calls import TextDelta, ToolCallDelta
from tests.unit.api.test_client import HELLO, run
from tests.unit.api.test_tool_fields import tool

DELTAS = [
    TextDelta("", 2, reasoning="I thi"),
    TextDelta("Let me ", 1, reasoning="nk"),
    TextDelta("see", 1, calls=(ToolCallDelta(0, "", "call_a", "weather"),)),
    TextDelta("", 1, calls=(ToolCallDelta(0, '{"city": "R'),)),
    TextDelta("", 1, calls=(ToolCallDelta(0, 'ome"}'), ToolCallDelta(1, "{}", "call_b", "time"))),
    TextDelta("", 1, "tool_calls"),
]
CALLS = [("call_a", "weather", '{"city": "Rome"}'), ("call_b", "time", "{}")]
ASKED = {"model": "org/demo", "messages": HELLO, "tools": [tool("weather"), tool("time")]}


def test_an_answer_has_its_calls_and_its_reasoning(door):
    door.deltas = DELTAS

    async def scenario(api):
        answer = await api.chat.completions.create(**ASKED)
        choice = answer.choices[0]
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == CALLS and choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see"
        assert choice.message.reasoning == choice.message.reasoning_content == "I think"
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        door.deltas = [TextDelta("", 1, calls=(ToolCallDelta(0, "{}", "call_c", "time"),)), DELTAS[-1]]
        answer = await api.chat.completions.create(**ASKED)
        assert answer.choices[0].message.content is None

    run(door, scenario)


def test_a_call_begins_with_id_and_name_and_goes_on_with_arguments(door):
    door.deltas = DELTAS

    async def scenario(api):
        events = [event async for event in await api.chat.completions.create(stream=True, n=2, **ASKED)]
        for index in range(2):
            choices = [each for event in events for each in event.choices if each.index == index]
            pieces = [piece for each in choices for piece in each.delta.tool_calls or ()]
            assert [(piece.index, piece.id, piece.type, piece.function.name) for piece in pieces] == [
                (0, "call_a", "function", "weather"),
                (0, None, None, None),
                (0, None, None, None),
                (1, "call_b", "function", "time"),
            ]
            assert "".join(piece.function.arguments for piece in pieces[:3]) == CALLS[0][2]
            assert "".join(getattr(each.delta, "reasoning_content", "") for each in choices) == "I think"
            assert "".join(each.delta.content or "" for each in choices) == "Let me see"
            assert choices[-1].finish_reason == "tool_calls"

    run(door, scenario)


class Weather(pydantic.BaseModel):
    city: str


def test_the_client_s_helper_for_streams_collects_calls(door):
    tools = [openai.pydantic_function_tool(Weather, name="weather")]

    async def scenario(api):
        asked = {"model": "org/demo", "messages": HELLO, "tools": tools}
        door.deltas = [DELTAS[2], DELTAS[3], TextDelta("", 1, calls=(ToolCallDelta(0, 'ome"}'),)), DELTAS[-1]]
        async with api.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_completion()
        (call,) = answer.choices[0].message.tool_calls
        assert call.id == "call_a" and call.function.parsed_arguments == Weather(city="Rome")
        assert (
            "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
        )
        rules = door.calls[0].tools
        assert rules.functions[0].is_strict
        assert json.loads(rules.functions[0].parameters)["additionalProperties"] is False

    run(door, scenario)
