"""What a request of /v1/responses means, in terms of a chat request, and which are refused by name."""

from __future__ import annotations

import pytest

from cluster.errors import ContextLengthError
from cluster.types.media import Modality
from router.api.chat.schema import MediaFields
from router.api.fields import SamplingFields
from tests.unit.api.test_app import call, error_of
from tests.unit.api.test_responses import PNG, SCHEMA, of_chat, of_responses, respond, user

FILE = {"type": "input_file"}


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
    # a negative prompt needs guidance, filters a temperature
    guided = {"seed": 4, "guidance_scale": 2.0, "temperature": 1.0}
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
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
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
