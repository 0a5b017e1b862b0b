"""/v1/responses through the real openai client, which validates every object and event by its own types."""

from __future__ import annotations

import asyncio
import gc
import json

import openai
import pytest
from pydantic import BaseModel

from cluster.errors import OverloadedError, UnavailableError
from router.api.body import parse
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.api.responses.schema import ResponsesRequest
from router.api.responses.translate import responses_call
from router.calls import MediaNote, ServedModels
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import call
from tests.unit.api.test_client import HANG_S, expect_soon, run

PNG = "data:image/png;base64,AAAA"
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
    return responses_call(parse(ResponsesRequest, body), CallContext(ServedModels("m"), FakeDoor.defaults))


def of_chat(**fields):
    return chat_call(
        parse(ChatRequest, json.dumps({"model": "m", **fields}).encode()),
        CallContext(ServedModels("m"), FakeDoor.defaults),
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
