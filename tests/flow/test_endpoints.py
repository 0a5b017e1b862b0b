"""/v1/responses, /v1/messages and /v1/audio/transcriptions over a whole cluster: the chat endpoint's
answers in other forms."""

from __future__ import annotations

import base64
import io
import re
import wave
from pathlib import Path

import pytest

from bench.workload import data_uri, png_bytes
from tests.flow.media_client import QUESTION, ask, part, picture, post, serving, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
SOUND = Path("deploy/demo_model/examples/three_words.wav").read_bytes()


async def test_other_forms_of_a_chat_request_have_its_answer(served):
    url = data_uri("image/png", png_bytes(picture(1)))
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "What do you see?"},
    ]
    seconds = _seconds(SOUND)
    _, client = served
    chat = await ask(client, [part("image", url)])
    body = {
        "model": "demo", "input": [{"role": "user", "content": parts}], "temperature": 0,
        "max_output_tokens": chat["usage"]["completion_tokens"],
    }  # fmt: skip
    response = (await client.post("/v1/responses", json=body)).json()
    assert response["output"][0]["content"][0]["text"] == text_of(chat)
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]

    begun = (await client.post("/v1/responses", json={**body, "background": True})).json()
    behind = await client.get(f"/v1/responses/{begun['id']}?stream=true&starting_after=1")
    assert behind.text.startswith("event: response.in_progress") and "[DONE]" in behind.text
    kept = (await client.get(f"/v1/responses/{begun['id']}")).json()
    assert kept["status"] == response["status"]
    assert kept["output"][0]["content"] == response["output"][0]["content"]

    data = url.partition(",")[2]
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "text", "text": "What do you see?"},
    ]
    body = {
        "model": "demo", "messages": [{"role": "user", "content": blocks}], "temperature": 0.0,
        "max_tokens": chat["usage"]["completion_tokens"],
    }  # fmt: skip
    message = (await client.post("/v1/messages", json=body)).json()
    assert message["content"][0]["text"] == text_of(chat)
    usage = message["usage"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    del body["temperature"], body["max_tokens"]
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == chat["usage"]["prompt_tokens"]

    form = {"model": "demo", "response_format": "verbose_json"}
    files = {"file": ("three_words.wav", SOUND)}
    heard = (await client.post("/v1/audio/transcriptions", data=form, files=files)).json()
    assert heard["text"] == "red circle seven"
    assert heard["duration"] == pytest.approx(seconds, abs=0.01) == heard["segments"][0]["end"]
    assert -0.5 < heard["segments"][0]["avg_logprob"] <= 0

    files = {"file": ("notes.txt", b"no sound")}
    refused = await client.post("/v1/audio/transcriptions", data={"model": "demo"}, files=files)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "file"


async def test_base64_with_the_line_breaks_of_mime_is_read_at_every_endpoint(served):
    file = png_bytes(picture(2))
    plain, lines = data_uri("image/png", file), base64.encodebytes(file).decode().replace("\n", "\r\n")
    broken = "data:image/png;base64," + lines
    sound = base64.encodebytes(SOUND).decode().replace("\n", "\r\n")
    question = {"type": "text", "text": "What do you see?"}
    _, client = served
    expected = await ask(client, [part("image", plain)])
    assert text_of(await ask(client, [part("image", broken)])) == text_of(expected)
    num_tokens = expected["usage"]["completion_tokens"]
    fields = {"model": "demo", "temperature": 0.0}
    for item in (
        {"type": "input_image", "image_url": broken},
        {"type": "input_file", "filename": "a.png", "file_data": broken},
        {"type": "input_file", "filename": "a.png", "file_data": lines},
    ):
        content = [item, {**question, "type": "input_text"}]
        body = {
            **fields,
            "input": [{"role": "user", "content": content}],
            "max_output_tokens": num_tokens,
        }
        response = await client.post("/v1/responses", json=body)
        assert response.json()["output"][0]["content"][0]["text"] == text_of(expected)
    source = {"type": "base64", "media_type": "image/png", "data": lines}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, question]}]
    body = {**fields, "messages": messages, "max_tokens": num_tokens}
    message = (await client.post("/v1/messages", json=body)).json()
    assert message["content"][0]["text"] == text_of(expected)
    heard = await ask(client, [{"type": "input_audio", "input_audio": {"format": "wav", "data": sound}}])
    whole = await ask(client, [part("audio", data_uri("audio/wav", SOUND))])
    assert text_of(heard) == text_of(whole)


async def test_the_place_of_a_bad_item_has_the_names_of_the_endpoint(served):
    """Whether the door finds it bad or an encoder, of whose pixels the header says nothing."""
    file = png_bytes(picture(2))
    cases = ((b"no image", "not an image"), (file[: len(file) // 2], "the file is truncated"))
    cluster, client = served
    for bad, reason in cases:
        data = base64.b64encode(bad).decode()
        url = f"data:image/png;base64,{data}"
        error = (await post(client, [QUESTION, part("image", url)])).json()["error"]
        assert error["param"] == "messages[0].content[1]" and reason in error["message"]
        item = {"type": "input_image", "image_url": url}
        body = {"model": "demo", "input": [{"role": "user", "content": [item]}]}
        error = (await client.post("/v1/responses", json=body)).json()["error"]
        assert error["param"] == "input[0].content[0]" and reason in error["message"]
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{**QUESTION}, {"type": "image", "source": source}]
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        refused = await client.post("/v1/messages", json=body)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"]
        await cluster.audit()


async def test_what_does_not_fit_is_told_in_the_words_that_clients_know():
    """litellm looks for the first ones, agents over /v1/messages for the others."""
    long = {"model": "demo", "messages": [{"role": "user", "content": "one two three " * 200}]}
    short = {"model": "demo", "messages": [{"role": "user", "content": "one two three"}]}
    async with serving(max_model_len=400) as (_, client):
        counted = await client.post("/v1/messages/count_tokens", json=short)
        num_tokens = counted.json()["input_tokens"]
        for body, max_tokens in ((long, 8), (short, 399), (short, 1000)):
            body = {**body, "max_tokens": max_tokens}
            chat = (await client.post("/v1/chat/completions", json=body)).json()["error"]
            assert chat["code"] == "context_length_exceeded"
            assert chat["message"].startswith("This model's maximum context length is 400 tokens. However, ")
        told = [
            (await client.post("/v1/messages", json={**body, "max_tokens": max_tokens})).json()["error"]
            for body, max_tokens in ((long, 8), (short, 399), (short, 1000))
        ]
        assert [each["type"] for each in told] == ["invalid_request_error"] * 3
        limit = "input length and `max_tokens` exceed context limit:"
        assert re.fullmatch(r"prompt is too long: \d{3,} tokens > 399 maximum", told[0]["message"])
        assert told[1]["message"] == f"{limit} {num_tokens} + 399 > 400"
        assert told[2]["message"].startswith(f"{limit} 1 + 1000 > 400")


def _seconds(data: bytes) -> float:
    with wave.open(io.BytesIO(data)) as sound:
        return sound.getnframes() / sound.getframerate()
