"""What one version of the openai client makes of a server, with strict validation of all it is sent. Run as a
process of its own, because two versions cannot be imported together: `client.py URL MODEL VERSION`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from pydantic import BaseModel

HELLO: Any = [{"role": "user", "content": "What do you see?"}]
FIELDS: Any = {"temperature": 0, "max_tokens": 6}


def client(url: str, *, is_strict: bool) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=120, _strict_response_validation=is_strict
    )


class Answer(BaseModel):
    kind: bool


async def chat(api: openai.AsyncOpenAI, model: str) -> None:
    fields = {**FIELDS, "logprobs": True, "top_logprobs": 2}
    whole = await api.chat.completions.create(model=model, messages=HELLO, n=2, **fields)
    events = await api.chat.completions.create(
        model=model, messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}, **fields
    )
    texts, usage = ["", ""], None
    async for event in events:
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and all(texts)
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def structure(api: openai.AsyncOpenAI, model: str) -> None:
    parsed = await api.chat.completions.parse(
        model=model, messages=HELLO, response_format=Answer, max_tokens=60, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    async with api.chat.completions.stream(
        model=model, messages=HELLO, response_format=Answer, max_tokens=60, temperature=0
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


async def completions(api: openai.AsyncOpenAI, model: str) -> None:
    whole = await api.completions.create(model=model, prompt=["a b", "c"], n=2, logprobs=2, **FIELDS)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    echoed = await api.completions.create(model=model, prompt="a b", echo=True, **FIELDS)
    assert echoed.choices[0].text == "a b" + whole.choices[0].text
    # The client's types have no null for the finish reason of an event before the last one, nor for the
    # log-probability of a prompt's first token
    async with client(str(api.base_url), is_strict=False) as lax:
        await loose_completions(lax, model, whole.choices[0].text)


async def loose_completions(lax: openai.AsyncOpenAI, model: str, text: str) -> None:
    events = await lax.completions.create(model=model, prompt="a b", stream=True, **FIELDS)
    assert "".join([c.text async for event in events for c in event.choices]) == text
    scored = await lax.completions.create(
        model=model, prompt=[[70, 71, 72], [73]], echo=True, logprobs=1, max_tokens=0
    )
    told = [choice.logprobs.token_logprobs for choice in scored.choices if choice.logprobs is not None]
    assert [len(each or ()) for each in told] == [3, 1]


class Answered(BaseModel):
    """A function without description: what it is called with."""

    kind: bool


async def tools(api: openai.AsyncOpenAI, model: str) -> None:
    """The call that must come; what it answered is a part of the next request."""
    fields: Any = {"tools": [openai.pydantic_function_tool(Answered, name="tell")], "tool_choice": "required"}
    fields |= {"temperature": 0, "max_tokens": 150, "parallel_tool_calls": False}
    whole = await api.chat.completions.parse(model=model, messages=HELLO, **fields)
    (call,) = whole.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Answered)
    async with api.chat.completions.stream(model=model, messages=HELLO, **fields) as stream:
        final = await stream.get_final_completion()
    (again,) = final.choices[0].message.tool_calls or []
    assert again.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "yes"}
    sent = call.model_dump(exclude={"function": {"parsed_arguments"}})
    history = [*HELLO, {"role": "assistant", "tool_calls": [sent]}, result]
    more = await api.chat.completions.create(model=model, messages=history, **FIELDS)
    assert more.usage and whole.usage and more.usage.prompt_tokens > 0


async def responses(api: openai.AsyncOpenAI, model: str) -> None:
    plain = await api.responses.create(
        model=model, input="What do you see?", temperature=0, max_output_tokens=6
    )
    chat = await api.chat.completions.create(model=model, messages=HELLO, **FIELDS)
    assert plain.output_text == chat.choices[0].message.content
    async with api.responses.stream(
        model=model, input=HELLO, text_format=Answer, temperature=0, max_output_tokens=60
    ) as stream:
        assert isinstance((await stream.get_final_response()).output_parsed, Answer)
    tool: Any = openai.pydantic_function_tool(Answered, name="tell")
    fields: Any = {"tools": [{"type": "function", **tool["function"]}], "tool_choice": "required"}
    fields |= {"temperature": 0, "max_output_tokens": 150, "parallel_tool_calls": False}
    whole = await api.responses.parse(model=model, input=HELLO, **fields)
    async with api.responses.stream(model=model, input=HELLO, **fields) as stream:
        final = await stream.get_final_response()
    for answer in (whole, final):
        (call,) = (item for item in answer.output if item.type == "function_call")
        Answered.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}
    history: Any = [*HELLO, *final.output, result]
    more = await api.responses.create(model=model, input=history, temperature=0, max_output_tokens=6)
    assert more.status in ("completed", "incomplete")


async def errors(api: openai.AsyncOpenAI, model: str) -> None:
    for refused, error, code in (
        ({"messages": HELLO, "model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"messages": HELLO, "temperature": 3}, openai.BadRequestError, None),
        ({"messages": HELLO, "max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
    ):
        try:
            await api.chat.completions.create(**{"model": model, **refused})
        except error as caught:
            assert code is None or caught.code == code, caught.code
        else:
            raise AssertionError(f"{refused} was not refused")


async def main(url: str, model: str, version: str) -> None:
    assert openai.__version__.startswith(version), openai.__version__
    async with client(f"{url}/v1", is_strict=True) as api:
        assert [each.id async for each in api.models.list()] == [model]
        for part in (chat, structure, completions, tools, responses, errors):
            await part(api, model)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
