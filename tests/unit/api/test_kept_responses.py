"""Background responses: generated without a client, read and taken up again by number, cancelled, forgotten."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import httpx
import openai
import pytest

from cluster.clock import SystemClock
from cluster.config.keys import ApiKey, key_entry
from cluster.errors import ContextLengthError, UnavailableError
from router.api.responses.render import ResponsesFormat
from router.api.responses.schema import ResponsesRequest
from router.calls import TextDelta
from router.http.keys import Access, KeyRing
from router.http.limits import Limits
from tests.fakes.http_server import serving
from tests.unit.api.test_app import call, error_of
from tests.unit.api.test_client import HANG_S, client, expect_soon, run
from tests.unit.api.test_responses import ORDER, of_responses

ASKED = {"model": "org/demo", "input": "hi", "background": True}
BEHIND = ["response.created", "response.queued", *ORDER[1:]]


def keeping(keep_s: float, **fields) -> Limits:
    return Limits(max_model_len=4096, vocab_size=2048, keep_responses_s=keep_s, **fields)


async def collected(events) -> list[dict]:
    return [event.to_dict() async for event in events]


async def ended(api, response_id: str):
    async with asyncio.timeout(HANG_S):
        while (found := await api.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
    return found


def test_an_answer_is_generated_behind_its_request(door):
    door.hold_at = 1

    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        assert (begun.status, begun.background, begun.output, begun.usage) == ("queued", True, [], None)
        await expect_soon(lambda: door.generations)
        async with asyncio.timeout(HANG_S):
            while (now := await api.responses.retrieve(begun.id)).status == "queued":
                await asyncio.sleep(0.005)
        assert (now.status, now.output_text, now.usage) == ("in_progress", "Hello", None)
        door.may_go_on.set()
        whole = await ended(api, begun.id)
        assert (whole.status, whole.output_text, whole.id) == ("completed", "Hello wörld", begun.id)
        assert whole.usage.output_tokens == 4 and whole.completed_at >= whole.created_at
        assert await ended(api, begun.id) == whole

    run(door, scenario)


def test_a_stream_is_taken_up_behind_any_event(door):
    async def scenario(api):
        events = await collected(await api.responses.create(**ASKED, stream=True))
        assert [event["type"] for event in events] == BEHIND
        assert [event["sequence_number"] for event in events] == list(range(len(BEHIND)))
        response_id = events[0]["response"]["id"]
        assert {event["response"]["id"] for event in events if "response" in event} == {response_id}
        assert await collected(await api.responses.retrieve(response_id, stream=True)) == events
        for after in range(len(events) + 1):  # 0 is an event, too, and the last one has none behind it
            rest = await api.responses.retrieve(response_id, stream=True, starting_after=after)
            assert await collected(rest) == events[after + 1 :]

    run(door, scenario)


def test_a_client_that_leaves_comes_back_to_the_rest(door):
    door.hold_at = 2

    async def scenario(api):
        seen = []
        async with await api.responses.create(**ASKED, stream=True) as events:
            async for event in events:
                seen.append(event.to_dict())
                if event.type == "response.output_text.delta" and event.delta == " wör":
                    break
        response_id, after = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        rest = await api.responses.retrieve(response_id, stream=True, starting_after=after)
        reading = asyncio.ensure_future(collected(rest))
        assert not door.generations[0].num_closed  # the client that left has not ended it
        door.may_go_on.set()
        seen += await reading
        assert [event["type"] for event in seen] == BEHIND
        assert seen == await collected(await api.responses.retrieve(response_id, stream=True))

    run(door, scenario)


def test_a_cancelled_answer_ends_with_what_it_has(door):
    door.hold_at = 1

    async def scenario(api):
        events = await api.responses.create(**ASKED, stream=True)
        response_id = (await anext(events)).response.id
        async for event in events:
            if event.type == "response.output_text.delta":
                break
        ended = await api.responses.cancel(response_id)
        assert (ended.status, ended.output_text) == ("cancelled", "Hello")
        assert ended.output[0].status == "incomplete" and door.generations[0].num_closed
        assert [event async for event in events] == []
        assert await api.responses.cancel(response_id) == await api.responses.retrieve(response_id) == ended

    run(door, scenario)


def test_cancelling_does_not_change_an_answer_that_has_ended(door):
    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        whole = await ended(api, begun.id)
        assert await api.responses.cancel(begun.id) == whole and whole.status == "completed"

    run(door, scenario)


def test_a_response_outlives_its_generation(door):
    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        await ended(api, begun.id)
        generation = weakref.ref(door.generations[0])
        door.generations = []
        await expect_soon(lambda: gc.collect() is not None and generation() is None)
        assert (await api.responses.retrieve(begun.id)).output_text == "Hello wörld"

    run(door, scenario)


async def test_cancelling_behind_the_last_event_changes_nothing(door):
    """The answer is complete, and its task has not ended yet."""
    asked, call = ResponsesRequest(model="m", input="hi", background=True), of_responses(input="hi")
    answer = ResponsesFormat("resp_1", 1, asked, call)
    answer.queued()
    generation = (await door.chat(call))[0]
    answer.first(0, generation, has_notes=False)
    delta = TextDelta("Hello", 1, "stop")
    answer.text(0, delta, generation)
    answer.finish(0, delta, generation)
    whole = answer.now()
    answer.cancel()
    assert answer.now() == whole and json.loads(whole)["status"] == "completed"


def test_a_deleted_response_is_cancelled_and_gone(door):
    door.hold_at = 0

    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        await expect_soon(lambda: door.generations)
        await api.responses.delete(begun.id)
        await expect_soon(lambda: door.generations[0].num_closed)
        with pytest.raises(openai.NotFoundError) as error:
            await api.responses.retrieve(begun.id)
        assert error.value.code == "response_not_found"

    run(door, scenario)


def test_an_error_is_told_in_the_response(door):
    door.error, door.fail_at = ContextLengthError("messages: too long", param="messages"), None

    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        failed = await ended(api, begun.id)
        assert (failed.status, failed.error.code, failed.error.message) == (
            "failed", "invalid_prompt", "input: too long",
        )  # fmt: skip
        door.error, door.fail_at = UnavailableError("no worker"), 1
        events = await collected(await api.responses.create(**ASKED, stream=True))
        assert events[-1]["type"] == "response.failed"
        failed = await api.responses.retrieve(events[-1]["response"]["id"])
        assert failed.to_dict() == events[-1]["response"] and failed.output_text == "Hello"

    run(door, scenario)


def test_an_unexpected_error_is_not_told(door, caplog):
    door.error, door.fail_at = ZeroDivisionError("a secret"), 1

    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        failed = await ended(api, begun.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert "secret" not in failed.error.message and "a secret" in caplog.text

    run(door, scenario)


def test_other_clients_do_not_find_it(door):
    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        other = api.with_options(api_key="another")
        for asked in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await asked(begun.id)
        assert (await ended(api, begun.id)).status == "completed"

    run(door, scenario)


@pytest.mark.parametrize("query", ["starting_after=0", "stream=true&starting_after=-1", "stream=maybe"])
def test_a_wrong_question_is_refused(door, query):
    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError) as caught:
            await api.get(f"/responses/{begun.id}?{query}", cast_to=httpx.Response)
        assert caught.value.param and caught.value.param in query

    run(door, scenario)


def test_what_cannot_be_kept_is_refused(door):
    refused = call(door, "POST", "/v1/responses", json={**ASKED, "store": False})
    assert refused.status_code == 400 and error_of(refused)["param"] == "store"
    assert call(door, "GET", "/v1/responses/resp_1").status_code == 404
    door.limits = keeping(0.0)
    refused = call(door, "POST", "/v1/responses", json=ASKED)
    assert refused.status_code == 400
    assert (error_of(refused)["param"], error_of(refused)["code"]) == (
        "background", "unsupported_parameter",
    )  # fmt: skip


def test_a_response_is_forgotten_in_time(door):
    door.limits = keeping(0.05)

    async def scenario(api):
        events = await collected(await api.responses.create(**ASKED, stream=True))
        async with asyncio.timeout(HANG_S):
            with pytest.raises(openai.NotFoundError):
                while True:
                    await api.responses.retrieve(events[0]["response"]["id"])
                    await asyncio.sleep(0.005)

    run(door, scenario)


def test_its_key_and_its_body_are_held_until_the_answer_has_ended(door):
    """The limit of a key counts it; to cancel it costs nothing of the limit."""
    entry = key_entry("alice", "sk-alice")
    door.access = Access(
        KeyRing(None, (ApiKey("alice", entry.hash, concurrent_requests=1),), SystemClock()),
        public_metrics=True,
    )
    door.hold_at = 0

    async def scenario() -> None:
        async with serving(door) as url, client(url) as api, httpx.AsyncClient(base_url=url) as plain:
            api = api.with_options(api_key="sk-alice")

            async def body_bytes() -> float:
                lines = (await plain.get("/metrics")).text.splitlines()
                (found,) = [line.split()[1] for line in lines if line.startswith("epdg_door_body_bytes ")]
                return float(found)

            begun = await api.responses.create(**ASKED)
            assert await body_bytes() > 0
            with pytest.raises(openai.RateLimitError):
                await api.responses.create(**ASKED)
            await api.responses.retrieve(begun.id)
            assert (await api.responses.cancel(begun.id)).status == "cancelled"
            assert await body_bytes() == 0
            door.hold_at = -1
            assert (await api.responses.create(model="org/demo", input="hi")).output_text == "Hello wörld"

    asyncio.run(scenario())
