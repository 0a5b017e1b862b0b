"""/v1/messages: the same call as a chat's, its answer and its events in Anthropic's form. A real client of that
API asks in `make conformance`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.errors import ContextLengthError, InternalError, OverloadedError, UnavailableError
from cluster.types.media import Modality
from router.api.anthropic.schema import MessagesRequest
from router.api.anthropic.translate import messages_call
from router.api.body import parse
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ChatCall, MediaNote, ServedModels, TextDelta, TokenizeCall, ToolCallDelta
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import call
from tests.unit.api.test_tool_answers import DELTAS
from tests.unit.http.test_keys import ALICE, World, entry

HELLO = {"role": "user", "content": "hi"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PNG_URL = "data:image/png;base64,AAAA"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "see", "description": "looks", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "toolu_1", "name": "see", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TEXT = {"type": "text", "text": "Wait.", "cache_control": {"type": "ephemeral"}}
DEFERRED = TOOL | {"defer_loading": True}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
REDACTED = {"type": "redacted_thinking", "data": "x"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}


def ask(door: FakeDoor, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    asked = {"model": "org/demo", "messages": [HELLO], **fields}
    if path == "/v1/messages":
        asked.setdefault("max_tokens", 8)
    return call(door, "POST", path, json=asked)


def message_error_of(response: httpx.Response) -> dict[str, str]:
    told = response.json()
    assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
    assert told["request_id"] == response.headers["x-request-id"] and set(told["error"]) == {
        "type",
        "message",
    }
    return told["error"]


def of_messages(**fields: Any) -> ChatCall:
    body = json.dumps({"model": "m", "max_tokens": 5, **fields}).encode()
    return messages_call(parse(MessagesRequest, body), CallContext(ServedModels("m"), FakeDoor.defaults))


def of_chat(**fields: Any) -> ChatCall:
    body = json.dumps({"model": "m", "max_tokens": 5, **fields}).encode()
    return chat_call(parse(ChatRequest, body), CallContext(ServedModels("m"), FakeDoor.defaults))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Each event has its type twice, and nothing is between events."""
    *blocks, rest = response.text.split("\n\n")
    assert rest == "" and response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message_has_the_text_and_the_tokens_that_were_not_cached(door):
    answer = ask(door).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "org/demo",
        "content": [{"type": "text", "text": "Hello wörld", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "output_tokens": 4,
        },
    }
    assert all(generation.num_closed for generation in door.generations)


def test_reasoning_text_and_calls_are_blocks_in_the_order_of_the_answer(door):
    door.deltas = DELTAS
    answer = ask(door).json()
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"] == [
        {"type": "thinking", "thinking": "I think", "signature": ""},
        {"type": "text", "text": "Let me see", "citations": None},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ]
    # They can be sent back as they are
    history = [HELLO, {"role": "assistant", "content": answer["content"]}]
    results = [
        {"type": "tool_result", "tool_use_id": name, "content": "sun"} for name in ("call_a", "call_b")
    ]
    assert ask(door, messages=[*history, {"role": "user", "content": results}]).status_code == 200
    _, again, first, second = door.calls[-1].messages
    assert (again.reasoning, again.content) == ("I think", "Let me see")
    assert [each.arguments for each in again.tool_calls] == ['{"city": "Rome"}', "{}"]
    assert [(each.role, each.name, each.content) for each in (first, second)] == [
        ("tool", "weather", "sun"), ("tool", "time", "sun"),
    ]  # fmt: skip


def test_a_stream_has_the_events_of_each_block_one_after_the_other(door):
    door.deltas = DELTAS
    start, *events, delta, stop = events_of(ask(door, stream=True))
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] == 3 and start["message"]["usage"]["output_tokens"] == 0
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["input_tokens"] == 3 and stop == {"type": "message_stop"}
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == len(pieces)
            blocks.append(event["content_block"])
            pieces.append("")
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            (kind, name), text = event["delta"]["type"].rsplit("_", 1), [*event["delta"].values()][1]
            assert name == "delta" and kind in {"thinking": "thinking", "text": "text"}.get(
                blocks[-1]["type"], "input_json"
            )
            pieces[-1] += text
    assert pieces == ["I think", "Let me see", '{"city": "Rome"}', "{}"]
    assert [event["type"] for event in events].count("content_block_stop") == 4
    assert [(block.get("id"), block.get("name")) for block in blocks[2:]] == [
        ("call_a", "weather"), ("call_b", "time"),
    ]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("last", "reason", "string"),
    [
        (TextDelta("x", 1, "stop"), "end_turn", None),
        (TextDelta("x", 1, "length"), "max_tokens", None),
        (TextDelta("x", 1, "stop", stop_string="END"), "stop_sequence", "END"),
    ],
)
def test_it_says_why_the_answer_has_ended(door, last, reason, string, is_stream):
    door.deltas = [last]
    answer = ask(door, stream=is_stream, stop_sequences=["END"])
    told = events_of(answer)[-2]["delta"] if is_stream else answer.json()
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, string)


@pytest.mark.parametrize("arguments", ['{"a": [', "[1]"])
def test_a_call_that_was_cut_or_is_no_object_has_no_input(door, arguments):
    door.deltas = [TextDelta("", 1, "length", calls=(ToolCallDelta(0, arguments, "call_a", "see"),))]
    answer = ask(door).json()
    assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["input"] == {}


def test_an_answer_without_text_has_no_block(door):
    door.deltas = [TextDelta("", 1, "stop")]
    assert ask(door).json()["content"] == []
    assert [event["type"] for event in events_of(ask(door, stream=True))] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"messages": [HELLO]}, {"messages": [HELLO]}),
        (
            {"messages": [HELLO], "system": [TEXT, {"type": "text", "text": "No."}]},
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "text", "text": "Wait."}, {"type": "text", "text": "No."}],
                    },
                    HELLO,
                ]
            },
        ),
        (
            {"messages": [HELLO], "tools": [TOOL | {"strict": True}], "tool_choice": {"type": "any"}},
            {
                "messages": [HELLO],
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "see", "description": "looks", "parameters": SCHEMA, "strict": True
                        },
                    }
                ],
                "tool_choice": "required",
            },
        ),
        (
            {"messages": [HELLO], "stop_sequences": ["x"], "top_p": 0.5, "temperature": 0.0, "top_k": 4},
            {"messages": [HELLO], "stop": ["x"], "top_p": 0.5, "temperature": 0.0, "top_k": 4},
        ),
        (
            {"messages": [HELLO], "context_management": {"edits": [KEEP_ALL]}, "tools": [DEFERRED]},
            {
                "messages": [HELLO],
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "see", "description": "looks", "parameters": SCHEMA},
                    }
                ],
            },
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [REDACTED, THOUGHT, TEXT]}, HELLO]},
            {
                "messages": [
                    HELLO, {"role": "assistant", "content": "Wait.", "reasoning_content": "hm"}, HELLO
                ]
            },
        ),
    ],
)  # fmt: skip
def test_a_request_means_what_the_chat_request_with_these_fields_means(fields, same):
    theirs, ours = of_messages(**fields), of_chat(**same)
    for name in ("messages", "media", "sampling", "stop", "options", "shows_reasoning", "structure"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert (theirs.tools is None) == (ours.tools is None)
    if theirs.tools is not None and ours.tools is not None:
        assert theirs.tools.is_constrained == ours.tools.is_constrained
        assert [f.parameters for f in theirs.tools.functions] == [f.parameters for f in ours.tools.functions]


@pytest.mark.parametrize(
    ("fields", "hints", "is_told"),
    [
        ({}, {}, True),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}, False),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}, True),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"enable_thinking": False, "reasoning_effort": "high"},
            True,
        ),
    ],
)
def test_thinking_and_effort_are_hints_to_the_template(fields, hints, is_told):
    made = of_messages(messages=[HELLO], **fields)
    assert {name: json.loads(value) for name, value in made.options.hints} == hints
    assert not made.options.variables and made.shows_reasoning == is_told


def test_what_a_search_for_tools_has_found_is_text():
    found = [{"type": "tool_reference", "tool_name": name} for name in ("see", "hear")]
    used = {"role": "assistant", "content": [USE]}
    answers = {"role": "user", "content": [RESULT | {"content": found}]}
    *_, result = of_messages(messages=[HELLO, used, answers]).messages
    assert [getattr(part, "text", part) for part in result.content] == [
        "<tool_reference>see</tool_reference>", "<tool_reference>hear</tool_reference>",
    ]  # fmt: skip


def test_images_stand_in_messages_and_in_results_under_their_own_names():
    asked = [
        {"role": "user", "content": [TEXT, PNG]},
        {"role": "assistant", "content": [THOUGHT, TEXT, USE]},
        {"role": "user", "content": [RESULT | {"content": [PNG]}, TEXT, PNG]},
    ]
    made = of_messages(messages=asked)
    assert [each.role for each in made.messages] == ["user", "assistant", "tool", "user"]
    assert [(source.url, source.modality) for source in made.media] == [(PNG_URL, Modality.IMAGE)] * 3
    assert [source.param for source in made.media] == [
        "messages[0].content[1]", "messages[2].content[0].content[0]", "messages[2].content[2]",
    ]  # fmt: skip


def test_a_call_of_a_function_that_was_never_given_stays_in_its_conversation():
    name = "functions.see:0 (é)"
    used = {"role": "assistant", "content": [USE | {"name": name}]}
    made = of_messages(messages=[HELLO, used, {"role": "user", "content": [RESULT]}])
    assert [each.name for each in made.messages[1].tool_calls] == [name] == [made.messages[2].name]


def test_a_schema_for_the_output_is_held():
    made = of_messages(messages=[HELLO], output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert made.structure is not None and json.loads(made.structure.text) == SCHEMA
    assert made.structure.param.startswith("output_config.format")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [PNG]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [TEXT, RESULT]}]}, "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [PNG | {"source": {"type": "base64", "data": "A"}}]}]},
            "messages[0].content[0].source.media_type",
        ),
        ({"system": [PNG]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"messages": [HELLO, {"role": "assistant", "content": "{"}]}, "messages[1]: this server does not"),
        ({"container": "x"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"messages": [{"role": "user", "content": [REDACTED]}]}, "messages[0].content[0]"),
        ({"stop_sequence": ["x"]}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1000] * 3}, "stop_sequences: this server accepts at most 2000 characters"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_anthropics_name_for_it(door, fields, named):
    response = ask(door, **fields)
    error = message_error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert not door.generations


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextLengthError("prompt: too long", param="prompt"), 400, "invalid_request_error"),
        (OverloadedError("busy", retry_after_s=2), 429, "rate_limit_error"),
        (UnavailableError("no worker"), 503, "overloaded_error"),
        (InternalError("broken"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_errors_have_anthropics_form_before_and_after_the_first_event(door, error, status, kind, is_stream):
    door.error, door.fail_at = error, None
    response = ask(door, stream=is_stream)
    assert response.status_code == status and message_error_of(response)["type"] == kind
    assert "prompt" not in message_error_of(response)["message"]
    door.fail_at = 1
    if is_stream:
        *_, last = events_of(ask(door, stream=True))
        assert last["type"] == "error" and last["error"]["type"] == kind


def test_the_tokens_of_a_conversation_are_counted(door):
    answer = ask(
        door, "/v1/messages/count_tokens", system="Be kind.", tools=[TOOL], tool_choice={"type": "auto"}
    )
    assert answer.json() == {"input_tokens": 2}
    (asked,) = door.calls
    assert isinstance(asked, TokenizeCall) and isinstance(asked.what, ChatCall)
    assert [each.role for each in asked.what.messages] == ["system", "user"] and asked.what.options.tools
    assert message_error_of(ask(door, "/v1/messages/count_tokens", max_tokens=5))["type"]
    said = [HELLO, {"role": "assistant", "content": "Oh"}]  # counts, too, though it is not answered
    assert ask(door, "/v1/messages/count_tokens", messages=said).status_code == 200
    assert message_error_of(call(door, "GET", "/v1/messages"))["type"] == "invalid_request_error"


def test_what_was_changed_in_media_is_told(door):
    door.media_notes = (MediaNote(0, "image", "budget", 4),)
    assert ask(door).json()["media"][0]["reason"] == "budget"
    assert "media" in events_of(ask(door, stream=True))[0]["message"]


def test_a_key_may_come_in_a_header_of_its_own():
    world = World(entry("alice", ALICE))
    asked = {"model": "org/demo", "messages": [HELLO], "max_tokens": 8}
    for headers, status in (
        ({"x-api-key": ALICE}, 200),
        ({"authorization": f"Bearer {ALICE}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        answer = call(world.door, "POST", "/v1/messages", json=asked, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert message_error_of(answer)["type"] == "authentication_error"
