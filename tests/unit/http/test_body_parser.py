"""Large bodies: parsed on threads that tenants share, never for a client that has left, and with work that
grows as the body does."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.text.defaults import GenerationDefaults
from router.api.anthropic.schema import Message, MessagesRequest, TextBlock, ThinkingBlock
from router.api.anthropic.translate import messages_call
from router.api.app import build_api
from router.api.protocol import CallContext
from router.api.responses.schema import ReasoningItem, ReasoningText, ResponsesRequest
from router.api.responses.translate import responses_call
from router.calls import ServedModels
from router.http.body_parser import BIG_BYTES, NUM_THREADS, NUM_THREADS_PER_TENANT, BodyParser
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_client import HANG_S, expect_soon

CONTEXT = CallContext(ServedModels("org/demo"), GenerationDefaults())


class Held:
    """Parses that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()

    def parse(self, body: bytes) -> str:
        self.begun.append(body.decode())
        assert self.gate.wait(HANG_S)
        return body.decode()


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    held = Held()
    yield held
    held.gate.set()


def send(parser: BodyParser, held: Held, name: str) -> asyncio.Future[str]:
    """`name`: its first letter is the tenant."""
    return asyncio.ensure_future(parser.parse(name[0], held.parse, name.encode()))


async def test_a_tenant_with_many_bodies_leaves_a_thread_to_the_others(held):
    parser = BodyParser()
    many = [send(parser, held, f"a{idx}") for idx in range(8)]
    await expect_soon(lambda: len(held.begun) == NUM_THREADS_PER_TENANT)
    other = send(parser, held, "b")
    await expect_soon(lambda: "b" in held.begun)
    assert held.begun[:NUM_THREADS_PER_TENANT] == ["a0", "a1"] and len(held.begun) == NUM_THREADS
    held.gate.set()
    assert await asyncio.gather(other, *many) == ["b", *(f"a{idx}" for idx in range(8))]


async def test_a_parse_whose_client_has_left_never_begins(held):
    parser = BodyParser()
    first, second, left, last = (send(parser, held, f"a{idx}") for idx in range(4))
    await expect_soon(lambda: len(held.begun) == 2)
    left.cancel()
    held.gate.set()
    assert await asyncio.gather(first, second, last) == ["a0", "a1", "a3"]
    assert left.cancelled() and "a2" not in held.begun


async def test_a_parse_that_runs_has_its_slot_until_it_ends(held):
    """A client that sends and leaves again and again has no more threads than one that stays."""
    parser = BodyParser()
    running = [send(parser, held, f"a{idx}") for idx in range(NUM_THREADS_PER_TENANT)]
    await expect_soon(lambda: len(held.begun) == NUM_THREADS_PER_TENANT)
    for task in running:
        task.cancel()
    later = send(parser, held, "a9")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in running) and "a9" not in held.begun
    held.gate.set()
    assert await later == "a9"
    await asyncio.wait(running, timeout=HANG_S)  # each ends with its own parse, in no order with the others
    assert all(task.cancelled() for task in running)


async def test_an_error_of_a_parse_reaches_its_client():
    def parse(body: bytes) -> str:
        raise RequestError("wrong", param="x")

    with pytest.raises(RequestError, match="wrong"):
        await BodyParser().parse("a", parse, b"")


class HeldDoor(FakeDoor):
    """What a body is translated with comes when the test lets it."""

    def __init__(self, held: Held):
        super().__init__()
        self._held = held

    @property
    def defaults(self) -> GenerationDefaults:
        if threading.current_thread().name.startswith("parse"):
            self._held.parse(b"")
        return FakeDoor.defaults


async def test_a_request_ends_when_its_client_leaves_before_its_parse(held):
    door: Any = HeldDoor(held)  # its `defaults` can be read only
    api = build_api(door)
    asked = {"model": "org/demo", "messages": [{"role": "user", "content": "x" * BIG_BYTES}]}
    leave = asyncio.Event()

    async def post(leave: asyncio.Event) -> None:
        messages = iter([{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is None:
                await leave.wait()
                return {"type": "http.disconnect"}
            return message

        async def nowhere(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http"}
        await api(scope, receive, nowhere)

    others = [asyncio.ensure_future(post(asyncio.Event())) for _ in range(NUM_THREADS_PER_TENANT)]
    await expect_soon(lambda: len(held.begun) == NUM_THREADS_PER_TENANT)
    waiting = asyncio.ensure_future(post(leave))
    leave.set()
    async with asyncio.timeout(HANG_S):
        await waiting
    held.gate.set()
    await asyncio.gather(*others)
    assert len(held.begun) == NUM_THREADS_PER_TENANT


class Copied(str):
    """A text that counts the characters that `+` copies."""

    num_chars = 0

    def __add__(self, other: str) -> Copied:
        Copied.num_chars += len(self) + len(other)
        return Copied(str.__add__(self, other))

    def __radd__(self, other: str) -> Copied:
        return Copied(other) + self


PIECE = Copied("abcd" * 4)


def reasoning_items(num: int) -> str:
    texts = [ReasoningText.model_construct(type="reasoning_text", text=PIECE)]
    items = [ReasoningItem.model_construct(type="reasoning", content=texts) for _ in range(num)]
    asked = ResponsesRequest.model_construct(model="org/demo", input=items)
    return responses_call(asked, CONTEXT).messages[0].reasoning


def assistant_of(blocks: list[Any]) -> Any:
    message = Message.model_construct(role="assistant", content=blocks)
    last = Message.model_validate({"role": "user", "content": "hi"})
    asked = MessagesRequest.model_construct(model="org/demo", max_tokens=5, messages=[message, last])
    return messages_call(asked, CONTEXT).messages[0]


def thinking_blocks(num: int) -> str:
    return assistant_of([ThinkingBlock.model_construct(type="thinking", thinking=PIECE)] * num).reasoning


def text_blocks(num: int) -> str:
    return assistant_of([TextBlock.model_construct(type="text", text=PIECE)] * num).content


def num_joins(call: Callable[[], Any]) -> int:
    """Calls of `str.join` in it."""
    joins: list[str] = []
    sys.setprofile(lambda frame, kind, what: kind == "c_call" and joins.append(what.__name__))
    try:
        call()
    finally:
        sys.setprofile(None)
    return joins.count("join")


@pytest.mark.parametrize("translate", [reasoning_items, thinking_blocks, text_blocks])
def test_thousands_of_pieces_are_joined_once(translate: Callable[[int], str]):
    Copied.num_chars = 0
    text = translate(400)
    assert text == PIECE * 400 and Copied.num_chars <= len(text)
    assert num_joins(lambda: translate(400)) == num_joins(lambda: translate(100))
