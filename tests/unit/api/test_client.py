"""The real openai client over loopback, with strict validation of every answer and event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import openai
import pytest

from cluster.errors import MediaError, OverloadedError, UnavailableError
from tests.fakes.http_server import serving

HANG_S = 60.0  # only a guard
HELLO = [{"role": "user", "content": "hi"}]


def client(url: str, strict: bool = True) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=url + "/v1",
        api_key="none",
        max_retries=0,
        timeout=HANG_S,
        # reading certificates would take longer than a test
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
        _strict_response_validation=strict,
    )


async def expect_soon(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds():
            await asyncio.sleep(0.005)


def run(door, scenario, strict: bool = True):
    async def main():
        async with serving(door) as url, client(url, strict) as api:
            await scenario(api)

    asyncio.run(main())


def test_an_answer_is_valid_and_carries_usage(door):
    async def scenario(api):
        answer = await api.chat.completions.create(model="org/demo", messages=HELLO, user="u", store=False)
        assert answer.choices[0].message.content == "Hello wörld"
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
            7,
            4,
            11,
        )
        assert answer.usage.prompt_tokens_details.cached_tokens == 4

    run(door, scenario)


def test_n_answers_count_the_prompt_once(door):
    async def scenario(api):
        answer = await api.chat.completions.create(
            model="org/demo", messages=HELLO, n=3, temperature=1, seed=5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 12)
        sampling = door.calls[0].sampling
        assert sampling[0].seed == 5 and len({params.seed for params in sampling}) == 3

    run(door, scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_valid_and_interleaves_its_choices(door, n):
    async def scenario(api):
        texts, roles, reasons, usage, order = [""] * n, {}, {}, None, []
        events = await api.chat.completions.create(
            model="org/demo", messages=HELLO, n=n, stream=True, stream_options={"include_usage": True}
        )
        async for event in events:
            assert usage is None
            usage = event.usage
            for choice in event.choices:
                if choice.delta.role:
                    assert choice.index not in roles
                    roles[choice.index] = choice.delta.role
                texts[choice.index] += choice.delta.content or ""
                order.append(choice.index)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == ["Hello wörld"] * n
        assert roles == dict.fromkeys(range(n), "assistant") and reasons == dict.fromkeys(range(n), "stop")
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (7, 4 * n)
        assert order != sorted(order) or n == 1

    run(door, scenario)


def test_completions_take_several_prompts(door):
    async def scenario(api):
        answer = await api.completions.create(model="org/demo", prompt=["a", "b"], n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 16)
        assert door.calls[0].stop.max_tokens == 16

    run(door, scenario)


def test_completion_streams_have_text_and_a_finish_reason(door):
    async def scenario(api):
        events = await api.completions.create(model="org/demo", prompt=[1, 2, 3], stream=True)
        choices = [choice async for event in events for choice in event.choices]
        assert "".join(choice.text for choice in choices) == "Hello wörld"
        assert [choice.finish_reason for choice in choices][-1] == "stop"
        assert door.calls[0].prompts == ((1, 2, 3),)

    run(
        door, scenario, strict=False
    )  # the client's own type forbids the null finish reasons that OpenAI sends


def test_models_are_listed_and_found_by_a_name_with_a_slash(door):
    async def scenario(api):
        assert [model.id async for model in api.models.list()] == ["org/demo"]
        assert (await api.models.retrieve("org/demo")).id == "org/demo"
        with pytest.raises(openai.NotFoundError) as caught:
            await api.chat.completions.create(model="other", messages=HELLO)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"

    run(door, scenario)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MediaError("item 0 (image): empty", param="messages"), openai.BadRequestError),
        (OverloadedError("busy", retry_after_s=3), openai.RateLimitError),
        (UnavailableError("lost"), openai.InternalServerError),
        (TimeoutError("secret internals"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_at", [None, 0])
def test_an_error_before_the_first_token_is_an_http_error(door, error, expected, stream, fail_at):
    door.error, door.fail_at = error, fail_at

    async def scenario(api):
        with pytest.raises(expected) as caught:
            await api.chat.completions.create(model="org/demo", messages=HELLO, stream=stream)
        assert "secret" not in caught.value.response.text
        assert caught.value.type
        if isinstance(error, OverloadedError):
            assert caught.value.response.headers["retry-after"] == "3"

    run(door, scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_mid_stream_is_an_event_that_ends_it(door, n):
    door.error, door.fail_at = UnavailableError("decode lost"), 2

    async def scenario(api):
        text = ""
        with pytest.raises(openai.APIError, match="decode lost"):
            async for event in await api.chat.completions.create(
                model="org/demo", messages=HELLO, stream=True, n=n
            ):
                text += event.choices[0].delta.content or ""
        assert "Hello" in text

    run(door, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", ["door", "token"])
def test_a_client_that_leaves_cancels_its_call(door, stream, waiting):
    door.words = ["x"] * 1000
    door.pause_s, door.start_pause_s = (HANG_S, 0.0) if waiting == "token" else (0.0, HANG_S)

    async def scenario(api):
        call = asyncio.ensure_future(
            api.chat.completions.create(model="org/demo", messages=HELLO, stream=stream, n=2)
        )
        await expect_soon(lambda: door.calls if waiting == "door" else door.generations)
        call.cancel()
        await expect_soon(lambda: door.was_cancelled if waiting == "door" else door.closed.is_set())

    run(door, scenario)


def test_a_client_that_leaves_in_mid_stream_cancels_its_call(door):
    door.words, door.pause_s = ["x"] * 10_000, 0.002

    async def scenario(api):
        events = await api.chat.completions.create(model="org/demo", messages=HELLO, stream=True)
        await anext(aiter(events))
        await events.close()
        async with asyncio.timeout(HANG_S):
            await door.closed.wait()
        assert door.generations[0].usage.completion_tokens < 1000

    run(door, scenario)


def test_a_large_body_is_read_whole(door):
    url = "data:image/png;base64," + "A" * 3_000_000

    async def scenario(api):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        await api.chat.completions.create(model="org/demo", messages=[{"role": "user", "content": parts}])
        assert door.calls[0].media[0].url == url

    run(door, scenario)


def test_an_error_of_one_choice_closes_them_all(door):
    door.error, door.fail_at = UnavailableError("decode lost"), 2

    async def scenario(api):
        with pytest.raises(openai.InternalServerError, match="decode lost"):
            await api.chat.completions.create(model="org/demo", messages=HELLO, n=3)
        assert [generation.num_closed for generation in door.generations] == [1, 1, 1]

    run(door, scenario)
