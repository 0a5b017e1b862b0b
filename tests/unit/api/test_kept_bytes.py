"""The memory of background responses: every byte counts before it is kept, each tenant has its share, and
readers take pieces."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import openai
import pytest

from cluster.errors import OverloadedError, RequestError
from router.api.responses import kept as kept_module
from router.api.responses.kept import (
    MAX_READERS,
    PIECE_BYTES,
    KeptResponse,
    KeptResponses,
    ResponseNotFoundError,
)
from router.api.responses.render import ResponsesFormat
from router.api.responses.schema import ResponsesRequest
from router.api.serving import stream
from router.calls import TextDelta
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import call, error_of
from tests.unit.api.test_client import HANG_S, expect_soon, run
from tests.unit.api.test_kept_responses import ASKED, collected, ended, keeping
from tests.unit.api.test_responses import of_responses


class Store(KeptResponses):
    """With answers whose generations are the test's. Every one of its steps is within the limit."""

    def __init__(self, max_bytes: int = 200_000):
        super().__init__(60.0, max_bytes)
        self.max_bytes = max_bytes
        self.freed: list[str] = []

    def ask(self, name: str, texts: Sequence[str], tenant: str = "me", gate: asyncio.Event | None = None):
        """A response with these deltas, after the gate."""
        asked, made = ResponsesRequest(model="m", input="hi", background=True), of_responses(input="hi")
        answer = ResponsesFormat(f"resp_{name}", 1, asked, made)
        door = FakeDoor(["x"])
        door.deltas = [*(TextDelta(text, 1) for text in texts), TextDelta("", 1, "stop")]

        async def begin() -> Any:
            if gate is not None:
                await gate.wait()
            return await door.chat(made)

        async def events() -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(stream(begin, answer)) as pieces:
                async for piece in pieces:
                    yield piece
                    await asyncio.sleep(0)
                    assert self.num_bytes <= self.max_bytes

        kept = self.add(answer, tenant)
        held = contextlib.ExitStack()
        held.callback(self.freed.append, name)
        self.begin(kept, events(), held)
        return kept

    def names(self) -> list[str]:
        return [name.removeprefix("resp_") for name in self._kept]


async def events_of(pieces: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    data = b"".join([piece async for piece in pieces])
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def over(*kept: KeptResponse) -> None:
    await expect_soon(lambda: all(each.is_over for each in kept))


def status_of(kept: KeptResponse) -> str:
    return json.loads(kept.answer.now())["status"]


async def test_a_tenants_oldest_ended_answers_make_room_for_its_new_ones():
    store = Store()
    for idx in range(12):
        await over(store.ask(str(idx), ["y" * 3000]))
    assert store.names()[-1] == "11" and "0" not in store.names() and len(store.names()) > 2
    assert store.names() == [str(idx) for idx in range(12 - len(store.names()), 12)]


async def test_answers_that_run_together_stay_within_the_room():
    store, gate = Store(), asyncio.Event()
    kept = [store.ask(str(idx), ["z" * 2000] * (idx + 1), gate=gate) for idx in range(8)]
    gate.set()
    await over(*kept)
    assert {status_of(each) for each in kept} == {"completed", "failed"}
    assert len(store.freed) == 8 and store.num_bytes <= store.max_bytes


async def test_an_answer_without_room_fails_in_an_event_that_follows_those_it_has():
    store = Store(60_000)
    kept = store.ask("a", ["v" * 1000] * 40)
    await over(kept)
    events = await events_of(kept.read())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events][-2:] == ["response.output_text.delta", "response.failed"]
    failed = events[-1]["response"]
    assert failed == json.loads(kept.answer.now()) and failed["output"] == []
    assert failed["error"]["code"] == "rate_limit_exceeded"
    assert "background responses would have" in failed["error"]["message"]
    assert store.freed == ["a"]


async def test_an_answer_that_ends_beyond_the_room_fails_too():
    """Its last event repeats it. What comes before that would fit."""
    for max_bytes in range(12_000, 100_000, 2000):
        store = Store(max_bytes)
        kept = store.ask("a", ["v" * 1000] * 4)
        await over(kept)
        events = await events_of(kept.read())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == f"response.{status_of(kept)}"
        assert events[-1]["response"] == json.loads(kept.answer.now())
    assert status_of(kept) == "completed"


@pytest.mark.parametrize("max_bytes", [10_000, 20_000, 30_000, 100_000])
async def test_a_cancelled_answer_is_within_the_room(max_bytes):
    store = Store(max_bytes)
    kept = store.ask("a", ["v" * 1000] * 40)
    for _ in range(14):
        await asyncio.sleep(0)
    await kept.cancel()
    assert kept.is_over and status_of(kept) in ("cancelled", "failed")
    assert store.num_bytes <= max_bytes


async def test_no_tenant_pushes_out_anothers_answers():
    store = Store()
    bobs = store.ask("bob", ["b" * 1000], tenant="bob")
    await over(bobs)
    for idx in range(30):
        await over(store.ask(str(idx), ["a" * 5000], tenant="alice"))
    assert store.find("resp_bob", "bob") is bobs and status_of(bobs) == "completed"
    mine = store.ask("carol", ["c" * 1000], tenant="carol")
    await over(mine)
    assert status_of(mine) == "completed", "there is always room for another tenant"


async def test_what_runs_fills_the_room_of_its_tenant_alone():
    store, gate = Store(60_000), asyncio.Event()
    with pytest.raises(OverloadedError, match="background responses would have"):
        for idx in range(100):
            store.ask(str(idx), [], gate=gate)
    store.ask("another", [], tenant="bob", gate=gate)
    gate.set()


async def test_a_reader_gets_pieces_however_much_there_is():
    store = Store(64 << 20)
    kept = store.ask("a", ["w" * (3 * PIECE_BYTES)] + ["small"] * 100)
    await over(kept)
    pieces = [piece async for piece in kept.read()]
    events = [event + b"\n\n" for event in b"".join(pieces).split(b"\n\n")[:-1]]
    *numbered, done = [event.split(b"data: ", 1)[1] for event in events]
    assert done == b"[DONE]\n\n"
    assert [json.loads(data)["sequence_number"] for data in numbered] == [*range(kept.answer.num_events)]
    assert max(map(len, pieces)) == PIECE_BYTES and len(pieces) > 12
    for after in range(len(events)):
        rest = b"".join([piece async for piece in kept.read(after)])
        assert rest == b"".join(events[after + 1 :])


async def test_an_answer_that_is_read_is_not_forgotten_for_another():
    store = Store(100_000)
    first = store.ask("first", ["a" * 2000])
    await over(first)
    reading = store.read(first)
    await anext(reading)
    for idx in range(10):
        with contextlib.suppress(OverloadedError):
            await over(store.ask(str(idx), ["b" * 2000]))
    assert "first" in store.names() and "0" not in store.names()
    assert (await events_of(reading))[-1]["type"] == "response.completed"
    for idx in range(10, 20):
        await over(store.ask(str(idx), ["b" * 2000]))
    assert "first" not in store.names()


async def test_a_deleted_answer_frees_its_bytes_and_ends_its_readers():
    store, gate = Store(), asyncio.Event()
    kept = store.ask("a", ["a"], gate=gate)
    reading = store.read(kept)
    await anext(reading)
    await anext(reading)
    await store.delete("resp_a", "me")
    assert store.num_bytes == 0 and store.freed == ["a"] and kept.is_over
    with pytest.raises(ResponseNotFoundError):
        await anext(reading)


async def test_a_deletion_whose_client_leaves_frees_everything_too():
    store, gate = Store(), asyncio.Event()
    store.ask("a", ["a"], gate=gate)
    await asyncio.sleep(0)
    deleting = asyncio.ensure_future(store.delete("resp_a", "me"))
    await asyncio.sleep(0)
    deleting.cancel()
    await expect_soon(lambda: store.freed == ["a"])
    assert store.num_bytes == 0 and not store.names()


async def test_a_task_that_was_cancelled_before_it_ran_gives_back_what_it_held():
    store = Store()
    kept = store.ask("a", ["a"])
    await kept.cancel()
    assert store.freed == ["a"] and kept.is_over and status_of(kept) == "cancelled"


async def test_a_tenant_has_so_many_readers_and_no_more():
    store = Store()
    kept = store.ask("a", ["a"])
    await over(kept)
    readers = [store.read(kept) for _ in range(MAX_READERS)]
    for reader in readers:
        await anext(reader)
    with pytest.raises(OverloadedError, match=f"at most {MAX_READERS}"):
        await anext(store.read(kept))
    others = store.ask("b", ["b"], tenant="bob")
    await over(others)
    await anext(store.read(others))
    await readers.pop().aclose()
    await anext(store.read(kept))
    for reader in readers:
        await reader.aclose()


def test_readers_beyond_the_limit_get_429(door, monkeypatch):
    monkeypatch.setattr(kept_module, "MAX_READERS", 1)
    door.hold_at = 1

    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        reading = await api.responses.retrieve(begun.id, stream=True)
        await anext(reading)
        once = api.with_options(max_retries=0)
        for more in ({"stream": True}, {}):
            with pytest.raises(openai.RateLimitError):
                await once.responses.retrieve(begun.id, **more)
        door.may_go_on.set()
        assert (await collected(reading))[-1]["type"] == "response.completed"
        assert (await ended(api, begun.id)).output_text == "Hello wörld"

    run(door, scenario)


def test_a_large_answer_is_read_whole(door):
    door.words = ["w" * 300_000, "end"]

    async def scenario(api):
        begun = await api.responses.create(**ASKED)
        whole = await ended(api, begun.id)
        assert whole.output_text == "w" * 300_000 + "end"
        events = await collected(await api.responses.retrieve(begun.id, stream=True))
        assert events[-1]["response"] == whole.to_dict()

    run(door, scenario)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("choice", ["none", "allowed"])
def test_tools_that_the_model_does_not_see_have_a_size_too(door, path, choice):
    """An answer of /v1/responses repeats them in each of its large events."""
    door.limits = keeping(60.0)
    is_chat = path == "/v1/chat/completions"

    def tool(name: str, num_chars: int) -> dict[str, Any]:
        function = {"name": name, "description": "d" * num_chars}
        return {"type": "function", "function": function} if is_chat else {"type": "function", **function}

    def named(name: str) -> dict[str, Any]:
        return (
            {"type": "function", "function": {"name": name}}
            if is_chat
            else {"type": "function", "name": name}
        )

    allowed: dict[str, Any] = {"mode": "auto", "tools": [named("t0")]}
    choices = {
        "none": "none",
        "allowed": {"type": "allowed_tools", **({"allowed_tools": allowed} if is_chat else allowed)},
    }
    asked = {"model": "org/demo", "tool_choice": choices[choice]}
    asked |= {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"input": "hi"}
    few = [tool(f"t{idx}", 100) for idx in range(4)]
    assert call(door, "POST", path, json={**asked, "tools": few}).status_code == 200
    many = [tool(f"t{idx}", 10_000 if idx else 100) for idx in range(20)]
    refused = call(door, "POST", path, json={**asked, "tools": many})
    assert refused.status_code == 400 and error_of(refused)["param"] == "tools"
    one = [tool("t0", 100), tool("t1", 210_000)]
    refused = call(door, "POST", path, json={**asked, "tools": one})
    assert refused.status_code == 400 and error_of(refused)["param"] == "tools[1]"


async def test_a_response_that_is_refused_has_begun_nothing():
    store = Store(1000)
    with pytest.raises(OverloadedError):
        store.ask("a", ["a"])
    assert not store.names() and store.num_bytes == 0


async def test_an_error_of_the_generation_is_told_with_the_output_so_far():
    store = Store()

    async def events(answer: ResponsesFormat) -> AsyncGenerator[bytes, None]:
        generation = (await FakeDoor(["x"]).chat(of_responses(input="hi")))[0]
        yield answer.first(0, generation, has_notes=False)
        yield answer.text(0, TextDelta("Hello", 1), generation)
        raise RequestError("no", param="prompt")

    asked, made = ResponsesRequest(model="m", input="hi", background=True), of_responses(input="hi")
    answer = ResponsesFormat("resp_a", 1, asked, made)
    kept = store.add(answer, "me")
    store.begin(kept, events(answer), contextlib.ExitStack())
    async with asyncio.timeout(HANG_S):
        told = await events_of(kept.read())
    failed = told[-1]["response"]
    assert (
        failed["error"]["code"] == "invalid_prompt" and failed["output"][0]["content"][0]["text"] == "Hello"
    )
