"""Tools, calls in the history and reasoning on /v1/responses: the same call as a chat's, and its answer as
the openai client reads it, with strict validation."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest

from cluster.errors import UnavailableError, UnsupportedError
from router.api.responses.items import OutputItems
from router.calls import ScoredToken, TextDelta, TokenScores, ToolCallDelta
from tests.unit.api.test_app import error_of
from tests.unit.api.test_client import run
from tests.unit.api.test_responses import PNG, of_chat, of_responses, respond
from tests.unit.api.test_tool_answers import CALLS, DELTAS, Weather
from tests.unit.api.test_tool_fields import SCHEMA, tool

FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA}
OTHER = {"type": "function", "name": "time", "parameters": None, "strict": True, "description": "tells it"}
BOTH: list[dict[str, Any]] = [FUNCTION, OTHER]
CALL = {"type": "function_call", "call_id": "call_1", "name": "see", "arguments": '{"a": [1]}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
HELLO = {"role": "user", "content": "hi"}
ITEM = "response.output_item"


def test_an_answer_has_an_item_for_its_reasoning_its_text_and_each_call(door):
    door.deltas = DELTAS

    async def scenario(api):
        asked = {"model": "org/demo", "input": "hi", "tools": BOTH, "parallel_tool_calls": False}
        answer = await api.responses.create(tool_choice={"type": "function", "name": "time"}, **asked)
        thought, said, *calls = answer.output
        assert thought.content[0].text == "I think" and thought.summary == []
        assert said.content[0].text == "Let me see" == answer.output_text
        assert [(call.call_id, call.name, call.arguments) for call in calls] == CALLS
        assert {item.status for item in answer.output} == {answer.status} == {"completed"}
        assert len({item.id for item in answer.output}) == 4
        assert answer.tool_choice.name == "time" and not answer.parallel_tool_calls
        assert [(tool.name, tool.strict) for tool in answer.tools] == [("weather", False), ("time", True)]
        # The client sends the items back as they are
        await api.responses.create(
            model="org/demo", input=[HELLO, *answer.output, OUTPUT | {"call_id": "call_a"}]
        )
        _, again, result = door.calls[-1].messages
        assert (again.reasoning, again.content) == ("I think", "Let me see")
        assert [call.call_id for call in again.tool_calls] == ["call_a", "call_b"]
        assert (result.name, result.content) == ("weather", "sun")

    run(door, scenario)


def test_a_stream_has_the_events_of_each_item_one_after_the_other(door):
    door.deltas = DELTAS

    async def scenario(api):
        raw = await api.responses.create(model="org/demo", input="hi", tools=BOTH, stream=True)
        events = [event async for event in raw]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [kind for kind, _ in itertools.groupby(event.type for event in events[2:-1])]
        part = "response.content_part"
        text, thought = "response.output_text", "response.reasoning_text"
        call = "response.function_call_arguments"
        assert kinds == [
            f"{ITEM}.added", f"{part}.added", f"{thought}.delta",
            f"{thought}.done", f"{part}.done", f"{ITEM}.done",
            f"{ITEM}.added", f"{part}.added", f"{text}.delta",
            f"{text}.done", f"{part}.done", f"{ITEM}.done",
            f"{ITEM}.added", f"{call}.delta", f"{call}.done", f"{ITEM}.done",
            f"{ITEM}.added", f"{call}.delta", f"{call}.done", f"{ITEM}.done",
        ]  # fmt: skip
        added = [event for event in events if event.type == f"{ITEM}.added"]
        assert [event.output_index for event in added] == [0, 1, 2, 3]
        assert [(each.item.call_id, each.item.name, each.item.arguments) for each in added[2:]] == [
            (*CALLS[0][:2], ""), (*CALLS[1][:2], ""),
        ]  # fmt: skip
        done = [event for event in events if event.type == f"{call}.done"]
        assert [event.arguments for event in done] == [CALLS[0][2], CALLS[1][2]]
        assert "".join(e.delta for e in events if e.type == f"{call}.delta") == CALLS[0][2] + CALLS[1][2]
        finished = [event.item for event in events if event.type == f"{ITEM}.done"]
        assert finished == events[-1].response.output and events[-1].type == "response.completed"

    run(door, scenario)


def test_the_client_s_helper_for_streams_parses_arguments(door):
    door.deltas = [DELTAS[2], DELTAS[3], TextDelta("", 1, calls=(ToolCallDelta(0, 'ome"}'),)), DELTAS[-1]]
    tools = [openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}]

    async def scenario(api):
        async with api.responses.stream(model="org/demo", input="hi", tools=tools) as stream:
            final = await stream.get_final_response()
        _, call = final.output
        assert call.parsed_arguments == {"city": "Rome"} or call.parsed_arguments == Weather(city="Rome")
        assert door.calls[0].tools.functions[0].is_strict

    run(door, scenario)


def test_an_answer_that_ends_within_a_call_is_incomplete(door):
    door.deltas = [
        TextDelta("", 1, calls=(ToolCallDelta(0, '{"ci', "call_a", "weather"),)),
        TextDelta("", 1, "length"),
    ]
    body = respond(door, tools=BOTH).json()
    (call,) = body["output"]
    assert (call["status"], call["arguments"], body["status"]) == ("incomplete", '{"ci', "incomplete")


def test_a_call_that_fails_in_mid_stream_is_told_as_far_as_it_came(door):
    door.deltas, door.error, door.fail_at = DELTAS[1:4], UnavailableError("decode lost"), 0

    async def scenario(api):
        raw = await api.responses.create(model="org/demo", input="hi", tools=BOTH, stream=True)
        failed = [event async for event in raw][-1]
        assert failed.type == "response.failed"
        assert [item.status for item in failed.response.output] == ["completed", "completed", "incomplete"]

    run(door, scenario)


def test_text_in_the_same_piece_as_a_call_s_end_comes_behind_the_call():
    items = OutputItems("resp_1")
    items.push(TextDelta("Look", calls=(ToolCallDelta(0, '{"a', "call_a", "f"),)))
    items.push(TextDelta("done", calls=(ToolCallDelta(0, '": 1}'), ToolCallDelta(1, "{}", "call_b", "g"))))
    items.close("completed")
    found = [each.get("arguments") or each["content"][0]["text"] for each in items.fields("")]
    assert found == ["Look", '{"a": 1}', "done", "{}"]


def test_log_probabilities_of_calls_and_reasoning_are_not_the_text_s():
    items, scores = OutputItems("resp_1"), (TokenScores(ScoredToken(b"x", -0.5), (), 0),)
    for delta in (
        TextDelta("", scores=scores, reasoning="I"),
        TextDelta("", scores=scores),
        TextDelta("a", scores=scores),
        TextDelta("", scores=scores),
        TextDelta("", scores=scores, calls=(ToolCallDelta(0, "{}", "call_a", "f"),)),
        TextDelta("", 1, "tool_calls", scores=scores),
    ):
        items.push(delta)
    items.close("completed")
    _, message, _ = items.fields("")
    logprobs = json.loads(bytes(message["content"][0]["logprobs"]))
    assert len(logprobs) == 2 + 1  # that of the piece in which the call begins, too
    alone = OutputItems("resp_1")
    alone.push(TextDelta("", 1, "stop", scores))
    alone.close("completed")
    assert len(json.loads(bytes(alone.fields("")[0]["content"][0]["logprobs"]))) == 1


def test_tools_mean_what_they_mean_in_a_chat_request():
    chat_tools = [
        tool("weather"),
        {"type": "function", "function": {k: v for k, v in OTHER.items() if k != "type"}},
    ]
    messages = [HELLO]
    for ours_choice, choice in (
        (None, None), ("none", "none"), ("required", "required"),
        ({"type": "function", "name": "time"}, {"type": "function", "function": {"name": "time"}}),
    ):  # fmt: skip
        ours = of_responses(
            input="hi",
            tools=BOTH,
            tool_choice=ours_choice,
            parallel_tool_calls=False,
            reasoning={"effort": "low"},
        )
        chats = of_chat(
            messages=messages,
            tools=chat_tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            reasoning_effort="low",
        )
        assert ours.options == chats.options and (ours.tools is None) == (choice == "none")
        if ours.tools is not None and chats.tools is not None:
            assert (ours.tools.must_call, ours.tools.is_parallel) == (chats.tools.must_call, False)
            names = [(each.name, each.parameters, each.is_strict) for each in ours.tools.functions]
            assert names == [(each.name, each.parameters, each.is_strict) for each in chats.tools.functions]
            assert {each.param.split(".")[1] for each in ours.tools.functions} == {"parameters"}


def test_calls_and_reasoning_in_the_input_are_one_message_of_a_chat():
    picture = [{"type": "input_text", "text": "sun"}, {"type": "input_image", "image_url": PNG}]
    call = {"id": "call_1", "type": "function", "function": {"name": "see", "arguments": '{"a": [1]}'}}
    second = call | {"id": "call_2"}
    ours = of_responses(input=[
        HELLO, THOUGHT, THOUGHT, SAID, CALL, CALL | {"call_id": "call_2"}, OUTPUT | {"output": picture},
        CALL, OUTPUT, THOUGHT, SAID, SAID, THOUGHT,
    ])  # fmt: skip
    parts = [{"type": "text", "text": "sun"}, {"type": "image_url", "image_url": {"url": PNG}}]
    said = {"role": "assistant", "content": "Wait."}
    chats = of_chat(messages=[
        HELLO,
        said | {"reasoning_content": "hmhm", "tool_calls": [call, second]},
        {"role": "tool", "tool_call_id": "call_1", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        said | {"reasoning_content": "hm"}, said, {"role": "assistant", "content": "", "reasoning": "hm"},
    ])  # fmt: skip
    assert ours.messages == chats.messages
    assert [item.param for item in ours.media] == ["input[6].output[1]"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FUNCTION, {"type": "function", "name": "bad name"}]}, "tools[1].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [FUNCTION | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [FUNCTION | {"function": {}}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": BOTH, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": [HELLO, CALL | {"name": ""}]}, "input[1].name"),
        ({"input": [HELLO, SAID, CALL, CALL | {"name": "f" * 257}]}, "input[3].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [OUTPUT | {"output": [{"type": "output_text", "text": "x"}]}]}, "input[0].output[0]"),
        ({"input": [OUTPUT | {"output": [{"type": "input_text"}]}]}, "input[0].output[0].text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [HELLO] + [CALL] * 300}, "input[300]"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(door, fields, param):
    response = respond(door, **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param, response.text
    assert (
        "messages" not in error_of(response)["message"] and "function.p" not in error_of(response)["message"]
    )
    assert not door.calls


def test_what_the_door_refuses_about_tools_is_named_as_this_endpoint_names_it(door):
    door.error = UnsupportedError("reasoning_effort: no such variable", param="reasoning_effort")
    door.fail_at = None
    error = error_of(respond(door, reasoning={"effort": "high"}))
    assert (error["param"], error["message"]) == ("reasoning.effort", "reasoning.effort: no such variable")
    assert json.loads(dict(door.calls[0].options.hints)["reasoning_effort"]) == "high"
