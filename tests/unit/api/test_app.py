"""Routes and error forms, over httpx's ASGI transport."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest

from cluster.types.request import LogitChanges
from router.api.app import build_api
from router.http.limits import CLIENT_TIMEOUTS, ClientTimeouts
from tests.fakes.fake_door import FakeDoor

BODY = {"model": "org/demo", "messages": [{"role": "user", "content": "hi"}]}


def call(
    door: FakeDoor, method: str, path: str, timeouts: ClientTimeouts = CLIENT_TIMEOUTS, **kwargs
) -> httpx.Response:
    async def main():
        api = build_api(door, timeouts)
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(main())


def chat(door: FakeDoor, **fields) -> httpx.Response:
    return call(door, "POST", "/v1/chat/completions", json={**BODY, **fields})


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(error[key] is None or isinstance(error[key], str) for key in error)
    return error


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": "org/demo"'])
def test_a_body_that_is_no_json_object_is_refused(door, body):
    response = call(door, "POST", "/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "Field required"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type", "Field required"),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages[0].content[0]",
            "Input should be an object",
        ),
    ],
)
def test_a_refusal_says_what_is_missing(door, fields, param, why):
    error = error_of(chat(door, **fields))
    assert (error["param"], error["message"]) == (param, f"{param}: {why}")


def test_a_body_that_cannot_be_read_is_refused_with_the_place(door):
    for body, place in ((b'{"model": }', "1 column 11"), (rb'{"model": "\ud83d"}', "1 column 18")):
        response = call(door, "POST", "/v1/chat/completions", content=body)
        assert error_of(response)["message"].endswith(f"at line {place}")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405), ("GET", "/v1/models/other/model", 404)],
)
def test_unknown_paths_and_methods_have_openais_error_form(door, method, path, status):
    response = call(door, method, path)
    assert response.status_code == status
    code = {"GET /nothing": "not_found", "GET /v1/models/other/model": "model_not_found"}
    assert error_of(response)["code"] == code.get(f"{method} {path}", "method_not_allowed")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [3, 2048]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [2048]}, "stop_token_ids"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"max_completion_tokens": 4097}, "max_completion_tokens"),
        ({"top_k": 2**64}, "top_k"),
        ({"mm_processor_kwargs": {"max_pixels": 2**64}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": 5}, "mm_processor_kwargs"),
        ({"stop": ""}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_a_wrong_field_is_named(door, fields, param):
    response = chat(door, **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert not door.calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a"] * 17}, "stop: this server accepts at most 16 items"),
        (
            {"stop": ["a" * 1000] * 2 + ["b"]},
            "stop: this server accepts at most 2000 characters in all items together",
        ),
        (
            {"bad_words": ["a" * 250] * 16 + ["b"]},
            "bad_words: this server accepts at most 4000 characters in all items together",
        ),
        ({"n": 9}, "n: this server accepts at most 8"),
        ({"temperature": -1}, "temperature: this server accepts at least 0"),
        ({"foo": 1}, "unknown field 'foo'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]},
            "messages[0].content[0].image_url: Input should be an object",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong(door, fields, message):
    assert error_of(chat(door, **fields))["message"] == message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (5, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([2048], "prompt"),
        ([[1], [2048]], "prompt"),
        ([1] * 4097, "prompt"),
        (["a", 1], "prompt[1]"),
        ("x" * (4096 * 32 + 1), "prompt"),
        (["a"] * 65, "prompt"),
    ],
)
def test_a_prompt_that_the_model_cannot_have_is_refused(door, prompt, param):
    response = call(door, "POST", "/v1/completions", json={"model": "org/demo", "prompt": prompt})
    assert response.status_code == 400 and error_of(response)["param"] == param
    assert not door.calls


def test_an_unknown_field_is_refused_with_the_nearest_known_name(door):
    assert "'max_tokens'" in error_of(chat(door, max_token=5))["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"service_tier": "flex"},
        {"suffix": "x"},
        {"echo": True},
        {"best_of": 2},
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(door, fields):
    response = chat(door, **fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "unsupported_parameter" and error["param"] == next(iter(fields))


def test_values_that_change_nothing_are_accepted(door):
    neutral = {
        "tools": [],
        "response_format": {"type": "text"},
        "logprobs": False,
        "logit_bias": {"7": 0},
        "bad_words": [],
        "min_tokens": 0,
        "repetition_penalty": 1,
        "include_reasoning": True,
        "add_special_tokens": False,
        "top_logprobs": 0,
        "store": False,
        "service_tier": "auto",
    }
    harmless = {"user": "x", "metadata": {"a": "b"}, "vllm_xargs": None, "truncation_side": None}
    harmless |= {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"}
    assert chat(door, frequency_penalty=0.0, presence_penalty=0, **neutral | harmless).status_code == 200
    assert door.calls[0].changes is None and door.calls[0].num_logprobs is None


def test_sampling_fields_reach_the_door(door):
    chat(
        door,
        logit_bias={"5": -100, "9": 2.5},
        frequency_penalty=0.5,
        presence_penalty=-2,
        repetition_penalty=1.2,
        allowed_token_ids=[9, 5, 9],
        bad_words=["no"],
        logprobs=True,
        top_logprobs=3,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    (call_,) = door.calls
    assert call_.changes == LogitChanges(((5, -100.0), (9, 2.5)), 1.2, 0.5, -2.0, allowed_token_ids=(9, 5))
    assert (call_.bad_words, call_.num_logprobs) == (("no",), 3)
    assert not call_.skips_special and call_.stop.shows_match
    body = {
        "model": "org/demo",
        "prompt": "x",
        "logprobs": 0,
        "n": 2,
        "best_of": 2,
        "max_completion_tokens": 5,
    }
    assert call(door, "POST", "/v1/completions", json=body).status_code == 200
    assert (door.calls[1].num_logprobs, door.calls[1].stop.max_tokens) == (0, 5)
    refused = error_of(call(door, "POST", "/v1/completions", json={**body, "best_of": 3}))
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "best_of")


def test_a_request_that_leaves_fields_out_gets_the_models_own(door):
    chat(door)
    (sampling,) = door.calls[0].sampling
    assert (sampling.temperature, sampling.seed) == (0.0, 0)
    assert door.calls[0].stop.token_ids == (1014,) and door.calls[0].stop.max_tokens is None
    chat(
        door,
        temperature=0.5,
        top_k=-1,
        ignore_eos=True,
        stop_token_ids=[3],
        stop="\n",
        max_completion_tokens=9,
    )
    call_ = door.calls[1]
    assert (call_.sampling[0].temperature, call_.sampling[0].top_k) == (0.5, 0) and call_.sampling[0].seed
    assert (call_.stop.token_ids, call_.stop.strings, call_.stop.max_tokens) == ((3,), ("\n",), 9)


def test_temperatures_that_float32_cannot_divide_by_are_greedy(door):
    for temperature in (1e-300, 9e-6, 1e-5):
        chat(door, temperature=temperature)
    assert [call_.sampling[0].temperature for call_ in door.calls] == [0, 0, 1e-5]


def test_choices_of_neighbouring_seeds_share_no_seed(door):
    for seed in range(5):
        chat(door, n=8, seed=seed, temperature=1)
    seeds = [params.seed for call_ in door.calls for params in call_.sampling]
    assert len(set(seeds)) == len(seeds) == 40


def test_media_parts_become_sources_in_order(door):
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        {"type": "text", "text": "and"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},
    ]
    assert chat(door, messages=[{"role": "developer", "content": parts}]).status_code == 200
    call_ = door.calls[0]
    assert call_.messages[0].role == "system"
    assert [source.modality for source in call_.media] == ["image", "audio", "video"]
    assert call_.media[1].url == "data:audio/wav;base64,AAAA"
    assert call_.media[2].param == "messages[0].content[3]"


def test_health_and_metrics(door):
    assert call(door, "GET", "/health").status_code == 200
    assert call(door, "HEAD", "/health").status_code == 200
    metrics = call(door, "GET", "/metrics").text
    assert metrics.startswith("epdg_test 1\n") and "epdg_door_body_bytes 0.0" in metrics
    door.ready = False
    assert call(door, "GET", "/health").status_code == 503


def test_a_stream_ends_with_done_and_has_one_role_per_choice(door):
    lines = chat(door, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert events[-1]["choices"] == [] and events[-1]["usage"]["total_tokens"] == 11
    assert all(event["usage"] is None for event in events[:-1])


def test_the_ledger_comes_when_it_is_asked_for(door):
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hello"}]}
    answer = call(door, "POST", "/v1/chat/completions", json=body, headers={"x-epdg-ledger": "1"})
    assert answer.headers["x-epdg-ledger"] == "ttft;dur=1.5" and answer.json()["ledger"] == [{"ttft_ms": 1.5}]
    answer = call(door, "POST", "/v1/chat/completions", json=body)
    assert "x-epdg-ledger" not in answer.headers and "ledger" not in answer.json()


@pytest.mark.parametrize("shows_workers", [False, True])
def test_the_ledger_names_workers_where_the_operator_allows_it(door, shows_workers):
    door.limits = msgspec.structs.replace(door.limits, shows_workers=shows_workers)
    for stream in (False, True):
        body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
        answer = call(door, "POST", "/v1/chat/completions", json=body, headers={"x-epdg-ledger": "1"})
        assert ("secret-replica" in answer.text) == shows_workers


def test_the_ledger_of_a_stream_is_its_last_event_but_the_usage(door):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "org/demo", "messages": messages, "n": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    answer = call(door, "POST", "/v1/chat/completions", json=body, headers={"x-epdg-ledger": "1"})
    assert answer.headers["x-epdg-ledger"] == "ttft;dur=1.5"
    lines = answer.text.split("\n\n")
    *events, ledger, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert ledger["ledger"] == [{"ttft_ms": 1.5}] and ledger["choices"] == [] and usage["usage"] is not None
    assert all("ledger" not in event for event in events)


def test_guidance_priority_and_min_tokens_reach_the_door(door):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]},
    ]
    fields = {
        "guidance_scale": 1.5,
        "negative_prompt": "nothing",
        "priority": 2,
        "min_tokens": 3,
        "max_tokens": 4,
    }
    assert chat(door, messages=messages, **fields).status_code == 200
    call_ = door.calls[0]
    assert (call_.priority, call_.stop.min_tokens, call_.guidance.scale) == (2, 3, 1.5)
    assert [(m.role, m.content) for m in call_.guidance.negative] == [
        ("system", "be brief"),
        ("user", "nothing"),
    ]
    assert len(call_.media) == 1  # the companion has none


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"priority": 99}, "priority"),
        ({"priority": -1}, "priority"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_engine_fields_that_make_no_sense_are_refused_by_name(door, fields, param):
    response = chat(door, **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_a_guidance_scale_of_one_is_no_guidance(door):
    assert chat(door, guidance_scale=1).status_code == 200 and door.calls[0].guidance is None
