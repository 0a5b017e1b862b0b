"""/v1/responses through the real openai client, which validates every object and event by its own types."""

from __future__ import annotations

import asyncio
import gc
import json

import openai
import pytest
from pydantic import BaseModel

from cluster.errors import ContextLengthError, OverloadedError, UnavailableError
from cluster.types.media import Modality
from router.api.body import parse
from router.api.chat.schema import ChatRequest, MediaFields
from router.api.chat.translate import chat_call
from router.api.context import CallContext
from router.api.fields import SamplingFields
from router.api.responses.schema import ResponsesRequest
from router.api.responses.translate import responses_call
from router.calls import MediaNote
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import call, error_of
from tests.unit.api.test_client import HANG_S, expect_soon, run

PNG = "data:image/png;base64,AAAA"
FILE = {"type": "input_file"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def user(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def respond(door: FakeDoor, **fields):
    return call(door, "POST", "/v1/responses", json={"model": "org/demo", "input": "hi", **fields})


def of_responses(**fields):
    body = json.dumps({"model": "m", **fields}).encode()
    return responses_call(parse(ResponsesRequest, body), CallContext("m", FakeDoor.defaults))


def of_chat(**fields):
    return chat_call(
        parse(ChatRequest, json.dumps({"model": "m", **fields}).encode()), CallContext("m", FakeDoor.defaults)
    )


def test_what_was_parsed_is_not_held_until_the_answer_ends():
    """Log-probabilities that are sent back take 47 times their bytes, and the body's budget has the bytes."""

    class Looking(FakeDoor):
        num_parsed = -1

        async def chat(self, call):
            self.num_parsed = num_parsed()
            return await super().chat(call)

    def num_parsed() -> int:
        return sum(isinstance(each, ResponsesRequest) for each in gc.get_objects())

    gc.collect()
    door, before = Looking(), num_parsed()
    text = {"type": "output_text", "text": "a", "logprobs": [{"token": "a", "logprob": -0.5}]}
    said = [{"role": "assistant", "content": [text]}, {"role": "user", "content": "b"}]
    assert respond(door, input=said).status_code == 200
    assert door.num_parsed == before


def test_a_response_is_valid_and_repeats_what_was_asked(door):
    async def scenario(api):
        answer = await api.responses.create(
            model="org/demo", input="hi", instructions="Be brief.", metadata={"a": "b"}, user="u",
            store=False, max_output_tokens=9, truncation="disabled", tools=[], tool_choice="auto",
        )  # fmt: skip
        assert answer.output_text == "Hello wörld" and answer.status == "completed"
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
            7,
            4,
            11,
        )
        assert answer.usage.input_tokens_details.cached_tokens == 4
        assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"a": "b"}, "u")
        assert answer.max_output_tokens == 9 and answer.temperature == 0 and answer.error is None
        assert answer.completed_at >= answer.created_at > 0
        (call,) = door.calls
        assert [(message.role, message.content) for message in call.messages] == [
            ("system", "Be brief."),
            ("user", "hi"),
        ]
        assert call.stop.max_tokens == 9

    run(door, scenario)


def test_a_stream_has_all_events_in_order(door):
    async def scenario(api):
        raw = await api.responses.create(model="org/demo", input="hi", stream=True)
        events = [event async for event in raw]
        assert [event.type for event in events] == ORDER
        assert [event.sequence_number for event in events] == list(range(len(ORDER)))
        assert "".join(event.delta for event in events if event.type == ORDER[4]) == "Hello wörld"
        assert events[7].text == events[8].part.text == events[9].item.content[0].text == "Hello wörld"
        assert (
            len({event.item_id for event in events if hasattr(event, "item_id")} | {events[9].item.id}) == 1
        )
        last = events[-1].response
        assert last.output_text == "Hello wörld" and last.usage.output_tokens == 4
        assert last.id == events[0].response.id and events[0].response.status == "in_progress"

    run(door, scenario)


def test_the_clients_stream_helper_collects_and_parses(door):
    class Answer(BaseModel):
        a: int

    door.words = ['{"a"', ":5}"]

    async def scenario(api):
        async with api.responses.stream(model="org/demo", input="hi", text_format=Answer) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == Answer(a=5)
        assert json.loads(door.calls[0].structure.text)["properties"]["a"]["type"] == "integer"

    run(door, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_incomplete(door, stream):
    door.last_reason = "length"

    async def scenario(api):
        answer = await api.responses.create(model="org/demo", input="hi", stream=stream)
        if stream:
            last = [event async for event in answer][-1]
            assert last.type == "response.incomplete"
            answer = last.response
        assert answer.status == "incomplete" and answer.output[0].status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens" and answer.completed_at is None
        assert answer.output_text == "Hello wörld"

    run(door, scenario)


def test_an_error_in_mid_stream_is_a_failed_response(door):
    door.error, door.fail_at = UnavailableError("decode lost"), 2

    async def scenario(api):
        events = [
            event async for event in await api.responses.create(model="org/demo", input="hi", stream=True)
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        failed = events[-1]
        assert failed.type == "response.failed" and failed.response.status == "failed"
        assert (failed.response.error.code, failed.response.error.message) == ("server_error", "decode lost")
        assert failed.response.output_text == "Hello wör"

    run(door, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_an_http_error(door, stream):
    door.error, door.fail_at = OverloadedError("busy", retry_after_s=3), 0

    async def scenario(api):
        with pytest.raises(openai.RateLimitError) as caught:
            await api.responses.create(model="org/demo", input="hi", stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"

    run(door, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_call(door, stream):
    door.start_pause_s = HANG_S

    async def scenario(api):
        asking = asyncio.ensure_future(api.responses.create(model="org/demo", input="hi", stream=stream))
        await expect_soon(lambda: door.calls)
        asking.cancel()
        await expect_soon(lambda: door.was_cancelled)

    run(door, scenario)


def test_a_client_that_leaves_in_mid_stream_cancels_its_call(door):
    door.words, door.pause_s = ["x"] * 10_000, 0.002

    async def scenario(api):
        events = await api.responses.create(model="org/demo", input="hi", stream=True)
        await anext(aiter(events))
        await events.close()
        await expect_soon(door.closed.is_set)
        assert door.generations[0].usage.completion_tokens < 1000

    run(door, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_the_text(door, stream):
    async def scenario(api):
        answer = await api.responses.create(
            model="org/demo",
            input="hi",
            include=["message.output_text.logprobs"],
            top_logprobs=1,
            stream=stream,
        )
        if stream:
            events = [event async for event in answer]
            deltas = [entry for event in events if event.type == ORDER[4] for entry in event.logprobs]
            assert [entry.logprob for entry in deltas] == [-0.5] * 4
            answer = events[-1].response
        entries = answer.output[0].content[0].logprobs
        assert "".join(entry.token for entry in entries) == "Hello wörld"
        assert [len(entry.top_logprobs) for entry in entries] == [1] * 4 and answer.top_logprobs == 1

    run(door, scenario)


def test_notes_about_media_and_the_timeline_are_told_as_elsewhere(door):
    door.media_notes = (MediaNote(0, "image", "budget", 16),)
    whole = call(
        door,
        "POST",
        "/v1/responses",
        json={"model": "org/demo", "input": "hi"},
        headers={"x-epdg-ledger": "1"},
    )
    assert whole.json()["media"][0]["reason"] == "budget" and whole.json()["ledger"]
    assert whole.headers["x-epdg-ledger"] == "ttft;dur=1.5" and "secret" not in whole.text


def test_a_conversation_means_what_it_means_in_a_chat_request():
    history = [
        {"type": "message", "role": "developer", "content": "Be kind."},
        {"role": "user", "content": [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": PNG, "detail": "low"},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "input_video", "video_url": "https://x.org/a.mp4"},
            {"type": "input_file", "filename": "a.mp3", "file_data": "AAAA"},
            {"type": "input_file", "file_url": "https://x.org/b.PNG?size=1"},
            {"type": "input_file", "file_data": "data:video/mp4;base64,AAAA"},
        ]},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "A cat.", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": PNG}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "video_url", "video_url": {"url": "https://x.org/a.mp4"}},
            {"type": "audio_url", "audio_url": {"url": "data:audio/mpeg;base64,AAAA"}},
            {"type": "image_url", "image_url": {"url": "https://x.org/b.PNG?size=1"}},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        ]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Why?"},
    ]  # fmt: skip
    ours, chats = of_responses(input=history, instructions="Short."), of_chat(messages=messages)
    assert ours.messages == chats.messages
    assert [(item.modality, item.url) for item in ours.media] == [
        (item.modality, item.url) for item in chats.media
    ]
    assert [item.param for item in ours.media] == [f"input[1].content[{idx}]" for idx in range(1, 7)]
    assert Modality.AUDIO in {item.modality for item in ours.media}


def test_sampling_and_structure_mean_what_they_mean_in_a_chat_request():
    asked = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    schema_format = {"name": "n", "schema": SCHEMA, "strict": True}
    ours = of_responses(
        input="hi", max_output_tokens=5, top_logprobs=3,
        text={"format": {"type": "json_schema", **schema_format}}, **asked,
    )  # fmt: skip
    chats = of_chat(
        messages=[{"role": "user", "content": "hi"}], max_tokens=5, logprobs=True, top_logprobs=3,
        response_format={"type": "json_schema", "json_schema": schema_format}, **asked,
    )  # fmt: skip
    assert (ours.messages, ours.stop, ours.changes) == (chats.messages, chats.stop, chats.changes)
    assert ours.structure is not None and chats.structure is not None
    assert (ours.num_logprobs, ours.structure.text) == (chats.num_logprobs, chats.structure.text)
    assert (ours.sampling[0].temperature, ours.sampling[0].top_p) == (0.5, 0.9)
    assert ours.structure.param == "text.format.schema" and ours.structure.is_strict
    assert of_responses(input="hi", text={"format": {"type": "json_object"}}).structure is not None
    assert of_responses(input="hi", text={"format": {"type": "text"}}).structure is None


SHARED = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "stop": ["x", "y"],
    "stop_token_ids": [3],
    "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "logit_bias": {"5": 1.0}, "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5,
    "bad_words": ["bad"], "allowed_token_ids": [1, 2, 3], "priority": 1,
    "guidance_scale": 3.0, "negative_prompt": "no", "cache_salt": "s",
    "mm_processor_kwargs": {"max_pixels": 999}, "media_io_kwargs": {"video": {"num_frames": 3}},
    "max_media_tokens": 99, "exact_media": True, "on_media_error": "omit",
}  # fmt: skip


def test_vllms_fields_mean_what_they_mean_in_a_chat_request(door):
    assert SHARED.keys() == {*SamplingFields.model_fields, *MediaFields.model_fields}
    said = [{"role": "user", "content": "hi"}]
    guided = {"seed": 4, "guidance_scale": 2.0}  # a negative prompt needs guidance
    usual = of_chat(messages=said, **guided)
    for name, value in SHARED.items():
        fields = {**guided, name: value}
        ours, chats = of_responses(input="hi", **fields), of_chat(messages=said, **fields)
        assert ours == chats, name
        assert name in ("mm_processor_kwargs", "media_io_kwargs") or ours != usual, name  # it has no media
    ours = of_responses(input="hi", structured_outputs={"regex": "a+"})
    assert ours.structure is not None and ours.structure.text == "a+"
    variables = {"enable_thinking": False}
    ours = of_responses(input="hi", chat_template_kwargs=variables, **guided)
    assert ours == of_chat(messages=said, chat_template_kwargs=variables, **guided) != usual
    assert respond(door, ignore_eos=True, max_output_tokens=4).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x"}] * 4096, "instructions": "y"}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": user({"type": "text", "text": "x"})}, "input[0].content[0]"),
        ({"input": user({"type": "output_text", "text": "x"})}, "input[0].content[0]"),
        ({"input": user({"type": "input_image", "file_id": "f"})}, "input[0].content[0].file_id"),
        ({"input": user({"type": "input_image", "image_url": 1})}, "input[0].content[0].image_url"),
        ({"input": user({"type": "input_image", "image_url": "h" * 9000})}, "input[0].content[0]"),
        ({"input": user({**FILE, "filename": "a.pdf", "file_data": "AAAA"})}, "input[0].content[0].type"),
        ({"input": user({**FILE, "file_url": "http://[/a"})}, "input[0].content[0].type"),
        ({"input": user({**FILE, "filename": "a.png"})}, "input[0].content[0]"),
        ({"input": "x" * 4096 * 33}, "input"),
        ({"instructions": "x" * 4096 * 33}, "input"),
        ({"max_output_tokens": 4097}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_as_this_endpoint_names_it(door, fields, param):
    response = respond(door, **fields)
    assert response.status_code == (404 if param == "model" else 400)
    error = error_of(response)
    assert error["param"] == param
    assert "messages" not in error["message"] and "max_completion_tokens" not in error["message"]
    assert not door.calls


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"store": True},
        {"prompt": {"id": "p"}},
        {"truncation": "auto"},
        {"service_tier": "flex"},
    ],
)
def test_what_is_not_built_is_refused_by_name(door, fields):
    response = respond(door, **fields)
    (param,) = fields
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == (param, "unsupported_parameter")


def test_what_clients_send_by_default_is_accepted(door):
    fields = {
        "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "prompt_cache_options": {"mode": "explicit"},
        "text": {"format": {"type": "text"}, "verbosity": None}, "stream_options": {"include_obfuscation": False}, "reasoning": {"effort": None, "summary": None},
        "background": False, "previous_response_id": None, "store": None,
    }  # fmt: skip
    assert respond(door, **fields).status_code == 200


def test_what_the_door_refuses_is_named_as_this_endpoint_names_it(door):
    door.error, door.fail_at = ContextLengthError("messages: too long", param="messages"), None
    response = respond(door)
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["message"]) == ("input", "input: too long")


def test_stored_inputs_are_refused(door):
    response = call(door, "GET", "/v1/responses/resp_1/input_items")
    assert response.status_code == 400 and "stores no inputs" in error_of(response)["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/score", "/v1/moderations", "/v1/images/generations"],
)
def test_endpoints_that_are_not_served_say_what_is(door, path):
    response = call(door, "POST", path, json={"model": "org/demo", "input": "hi"})
    assert response.status_code == 404 and error_of(response)["code"] == "unsupported_endpoint"
    assert path in error_of(response)["message"] and "/v1/responses" in error_of(response)["message"]
