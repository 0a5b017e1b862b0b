"""Limits of a key: requests and tokens a minute, and requests at once, in virtual time."""

from __future__ import annotations

import asyncio

import openai
import pytest

from cluster.config.keys import KeyLimits
from router.http.keys import LOOK_PERIOD_S
from router.http.rates import Allowance, RateLimitError, TenantUse
from tests.fakes.clock import ManualClock
from tests.fakes.http_server import serving
from tests.unit.api.test_app import BODY, error_of
from tests.unit.http.test_keys import ALICE, BOB, World, entry

TOKENS = 11  # that the scripted door counts for an answer: 7 of the prompt, 4 of the text


async def test_requests_a_minute_come_back_evenly():
    world = World(entry("alice", ALICE, requests_per_minute=3), entry("bob", BOB))
    assert [(await world.chat(ALICE)).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = await world.chat(ALICE)
    assert refused.headers["retry-after"] == "20"
    error = error_of(refused)
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert error["message"].startswith("the key 'alice' may use 3 requests a minute")
    assert (await world.chat(BOB)).status_code == 200
    assert (await world.ask("GET", "/v1/models", ALICE)).status_code == 200  # only work counts
    world.clock.at += 19.9
    assert (await world.chat(ALICE)).status_code == 429
    world.clock.at += 0.1
    assert [(await world.chat(ALICE)).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_count(stream):
    world = World(entry("alice", ALICE, tokens_per_minute=2 * TOKENS))
    body = {"stream": stream, "n": 2, "temperature": 1}  # two choices share a prompt
    assert [(await world.chat(ALICE, **body)).status_code for _ in range(3)] == [200, 200, 429]
    spent = 2 * (TOKENS + 4)
    wait_s = (spent - 2 * TOKENS + 1) * 60 / (2 * TOKENS)
    world.clock.at += wait_s - 0.1
    assert (await world.chat(ALICE)).status_code == 429
    world.clock.at += 0.1
    assert (await world.chat(ALICE)).status_code == 200


async def test_a_responses_tokens_count_too():
    world = World(entry("alice", ALICE, tokens_per_minute=TOKENS))
    body = {"model": "org/demo", "input": "hi"}
    answers = [await world.ask("POST", "/v1/responses", ALICE, json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


async def test_tokens_of_answers_that_still_run_count_when_the_next_request_comes():
    world = World(entry("alice", ALICE, tokens_per_minute=8))
    world.door.words, world.door.pause_s = ["a", "b"], 60.0
    running = asyncio.ensure_future(world.chat(ALICE))
    while not world.door.generations:
        await asyncio.sleep(0)
    (generation,) = world.door.generations
    generation.usage = type(generation.usage)(prompt_tokens=7, completion_tokens=1)
    assert (await world.chat(ALICE)).status_code == 429
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    world.clock.at += 60 / 8
    world.door.words, world.door.pause_s = [""], 0.0
    assert (await world.chat(ALICE)).status_code == 200  # counted once


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_once_are_counted_until_their_end(stream):
    world = World(entry("alice", ALICE, concurrent_requests=1), entry("alice", BOB, concurrent_requests=1))
    world.door.start_pause_s = 60.0
    running = asyncio.ensure_future(world.chat(ALICE, stream=stream))
    while not world.door.calls:
        await asyncio.sleep(0)
    refused = await world.chat(BOB)  # another key of the same tenant
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    world.door.start_pause_s = 0.0
    assert [(await world.chat(ALICE, stream=stream)).status_code for _ in range(3)] == [200] * 3


async def test_a_request_that_is_refused_or_fails_is_charged_for_what_it_did():
    world = World(entry("alice", ALICE, requests_per_minute=1, concurrent_requests=1, tokens_per_minute=1))
    assert (await world.ask("POST", "/v1/chat/completions", ALICE, content=b"{")).status_code == 400
    assert (await world.chat(ALICE)).status_code == 429
    world.clock.at += 60
    assert (await world.chat(ALICE)).status_code == 200


async def test_a_changed_limit_holds_at_once_and_an_unchanged_one_is_kept():
    world = World(entry("alice", ALICE, requests_per_minute=1, concurrent_requests=5))
    await world.chat(ALICE)
    world.source.change(entry("alice", ALICE, requests_per_minute=1, concurrent_requests=6))
    world.clock.at += LOOK_PERIOD_S
    assert (await world.chat(ALICE)).status_code == 429
    world.source.change(entry("alice", ALICE, requests_per_minute=2))
    world.clock.at += LOOK_PERIOD_S
    assert [(await world.chat(ALICE)).status_code for _ in range(3)] == [200, 200, 429]
    world.source.change(entry("alice", ALICE))
    world.clock.at += LOOK_PERIOD_S
    assert (await world.chat(ALICE)).status_code == 200


def test_an_allowance_is_kept_for_a_minute_at_most_and_pays_its_debt_back():
    allowance = Allowance(60, now=0.0)
    allowance.charge(0, now=1000.0)
    allowance.charge(90, now=1000.0)
    assert allowance.wait_s(1000.0) == 31.0 and allowance.wait_s(1031.0) == 0.0


def test_nothing_is_charged_for_a_request_that_does_not_begin():
    use = TenantUse("alice", KeyLimits(5, 5, 1), ManualClock())
    permit = use.begin()
    for _ in range(20):
        with pytest.raises(RateLimitError):
            use.begin()
    with permit:
        pass
    assert use.begin()


def test_openais_client_waits_as_long_as_it_is_told():
    world = World(entry("alice", ALICE, requests_per_minute=1))

    async def main() -> None:
        async with (
            serving(world.door) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0) as client,
        ):
            await client.chat.completions.create(**BODY)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**BODY)
            assert caught.value.response.headers["retry-after"] == "60"

    asyncio.run(main())
