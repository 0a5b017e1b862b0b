"""Tools, calls in the history and reasoning: what a request means, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.text.chat import ChatMedia, ChatText, ToolCall
from cluster.types.media import Modality
from tests.unit.api.test_app import call, chat, error_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HELLO = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def tool(name: str, parameters: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BOTH = [tool("a"), tool("b", strict=True, description="does b")]


@pytest.mark.parametrize(
    ("fields", "names", "must_call", "is_parallel"),
    [
        ({}, ["a", "b"], False, True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["a", "b"], False, False),
        ({"tool_choice": "required"}, ["a", "b"], True, True),
        ({"tool_choice": named("b")}, ["b"], True, False),
    ],
)
def test_a_choice_says_which_tools_may_and_must_be_called(door, fields, names, must_call, is_parallel):
    assert chat(door, tools=BOTH, **fields).status_code == 200
    rules = door.calls[0].tools
    assert [function.name for function in rules.functions] == names
    assert (rules.must_call, rules.is_parallel) == (must_call, is_parallel)
    assert [function.is_strict for function in rules.functions] == [name == "b" for name in names]
    shown = [json.loads(each) for each in door.calls[0].options.tools]
    assert [each["function"]["name"] for each in shown] == ["a", "b"]
    assert "strict" not in shown[1]["function"] and shown[1]["function"]["description"] == "does b"


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_allowed_tools_are_as_if_there_were_no_others(door, path, mode):
    tools = BOTH
    choice: dict[str, Any] = {"allowed_tools": {"mode": mode, "tools": [named("b")]}}
    asked: dict[str, Any] = {"messages": [HELLO]}
    if path == "/v1/responses":
        tools = [{"type": "function", **each["function"]} for each in BOTH]
        asked, choice = {"input": "hi"}, {"mode": mode, "tools": [{"type": "function", "name": "b"}]}
    choice["type"] = "allowed_tools"
    body = {"model": "org/demo", **asked, "tools": tools, "tool_choice": choice}
    answer = call(door, "POST", path, json=body)
    assert answer.status_code == 200, answer.text
    assert path != "/v1/responses" or answer.json()["tool_choice"] == choice
    rules, (shown,) = door.calls[0].tools, door.calls[0].options.tools
    assert [function.name for function in rules.functions] == ["b"]
    assert rules.must_call == (mode == "required") and rules.is_parallel
    assert rules.functions[0].param.startswith("tools[1].") and json.loads(shown)["function"]["name"] == "b"


def test_the_strongest_effort_is_xhigh(door):
    assert chat(door, reasoning_effort="max").status_code == 200
    assert dict(door.calls[0].options.hints)["reasoning_effort"] == '"xhigh"'


def test_refusals_of_other_servers_are_text_in_a_conversation(door):
    part = {"type": "text", "text": "Well. ", "prompt_cache_breakpoint": {"mode": "explicit"}}
    image = IMAGE | {"prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [
        {"role": "user", "content": [part, image]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [part, {"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": [part], "refusal": "No."},
    ]
    assert chat(door, messages=messages).status_code == 200
    _, alone, among, beside = door.calls[0].messages
    assert alone.content == "No."
    assert (
        [each.text for each in among.content] == ["Well. ", "No."] == [each.text for each in beside.content]
    )
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert (
        call(door, "POST", "/v1/responses", json={"model": "org/demo", "input": [refused]}).status_code == 200
    )
    assert door.calls[1].messages[0].content == "No."


@pytest.mark.parametrize(("num_chars", "status"), [(128, 200), (129, 400)])
def test_tools_have_names_of_up_to_128_letters(door, num_chars, status):
    name = "mcp__server__" + "x" * (num_chars - 13)
    for path, said, offered in (
        ("/v1/chat/completions", {"messages": [HELLO]}, tool(name)),
        ("/v1/responses", {"input": "hi"}, {"type": "function", "name": name}),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 5}, {"name": name, "input_schema": SCHEMA}),
    ):
        body = {"model": "org/demo", **said, "tools": [offered]}
        assert call(door, "POST", path, json=body).status_code == status


def test_a_model_that_must_not_call_sees_no_tools(door):
    assert chat(door, tools=BOTH, tool_choice="none").status_code == 200
    assert door.calls[0].tools is None and not door.calls[0].options.tools


def test_variables_of_the_template_and_the_wish_for_reasoning_reach_the_door(door):
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert chat(door, include_reasoning=False, **fields).status_code == 200
    options = door.calls[0].options
    assert dict(options.variables) == {"enable_thinking": "false"}
    assert dict(options.hints) == {"enable_thinking": "true", "reasoning_effort": '"low"'}
    assert options.hint_param == "reasoning_effort" and not door.calls[0].shows_reasoning


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_without_effort_nothing_is_thought(door, path):
    asked = {"messages": [HELLO], "reasoning_effort": "none"}
    if path == "/v1/responses":
        asked = {"input": "hi", "reasoning": {"effort": "none"}}
    assert call(door, "POST", path, json={"model": "org/demo", **asked}).status_code == 200
    options = door.calls[0].options
    assert dict(options.hints) == {"enable_thinking": "false"} and not options.hint_param


def test_a_conversation_with_calls_and_their_results_is_taken_over(door):
    call = {"id": "call_1", "type": "function", "function": {"name": "see", "arguments": '{"a": [1]}'}}
    call["function"]["parsed_arguments"] = {"a": [1]}
    messages = [
        HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning_content": "hm",
            "refusal": None,
            "parsed": None,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}, IMAGE]},
    ]
    assert chat(door, messages=messages).status_code == 200
    _, answer, result = door.calls[0].messages
    assert answer.tool_calls == (ToolCall("call_1", "see", '{"a": [1]}'),)
    assert (answer.content, answer.reasoning) == ("", "hm")
    assert result.content == (ChatText("sun"), ChatMedia(Modality.IMAGE))
    assert (result.tool_call_id, result.name) == ("call_1", "see")
    assert [source.param for source in door.calls[0].media] == ["messages[2].content[1]"]


def calling(**changes: Any) -> dict[str, Any]:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}} | changes
    return {"messages": [HELLO, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [tool("bad name")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", 5)]}, "tools[0].function.parameters"),
        ({"tools": [tool("a")] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": BOTH}, "tool_choice"),
        ({"tool_choice": named("c"), "tools": BOTH}, "tool_choice.function.name"),
        (
            {
                "tools": BOTH,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named("c")]},
                },
            },
            "tool_choice.allowed_tools",
        ),
        ({"messages": [HELLO | {"refusal": "No."}]}, "messages[0]"),
        ({"messages": [HELLO | {"content": [{"type": "refusal", "refusal": "No."}]}]}, "messages[0]"),
        ({"tools": BOTH, "guided_regex": "a"}, "guided_regex"),
        ({"tools": BOTH, "min_tokens": 3}, "min_tokens"),
        ({"reasoning_effort": "heroic"}, "reasoning_effort"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (calling(type="custom"), "messages[1].tool_calls[0].type"),
        (calling(function={"name": "", "arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
        (calling(function={"name": "f" * 257, "arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
        (
            {"messages": [HELLO | {"tool_calls": calling()["messages"][1]["tool_calls"]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [HELLO | {"tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(door, fields, param):
    response = chat(door, **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param
    assert not door.calls


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        ('{"a": "\\ud83d"}', {"a": "?"}),
        ('{"a": "bc', {"invalid_arguments": '{"a": "bc'}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ('{"a": NaN}', {"invalid_arguments": '{"a": NaN}'}),
        ("[" * 9999, {"invalid_arguments": "[" * 9999}),
    ],
)
def test_a_call_that_the_model_wrote_wrongly_does_not_end_its_conversation(door, arguments, shown):
    """At the chat's endpoint and at /v1/responses; the template gets an object."""
    name = "functions.f:0 (é)" + "x" * 239
    called = calling(function={"name": name, "arguments": arguments})
    item = {"type": "function_call", "call_id": "x", "name": name, "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "x", "output": "no such tool", "name": name}
    answers = [
        chat(door, **called),
        call(door, "POST", "/v1/responses", json={"model": "org/demo", "input": [HELLO, item, output]}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    for each in door.calls:
        (made,) = each.messages[1].tool_calls
        assert made.name == name and json.loads(made.arguments) == shown
