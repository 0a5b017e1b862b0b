"""Bodies that are too large, too intricate, too slow or too many: refused while they come."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import httpx
import msgspec
import pytest

from cluster import overload
from cluster.errors import OverloadedError
from cluster.text.defaults import GenerationDefaults
from router.api.app import build_api
from router.http.bodies import BodyBudget
from router.http.limits import CLIENT_TIMEOUTS, ClientTimeouts, Limits
from tests.fakes.fake_door import FakeDoor
from tests.fakes.http_server import serving
from tests.fakes.watched import Watch
from tests.unit.api.test_app import call, error_of

MIB = 1 << 20
# Times slower than the host on which the bounds were set. They find costs that grow without a bound.
SLOW_HOST = 5
CHUNK = 64 << 10
HEAD = '{"model":"org/demo",'
LARGE = Limits(max_model_len=32_768, vocab_size=152_000)


def filled(start: str, item: str, end: str, num_bytes: int = 64 * MIB) -> bytes:
    return (start + ",".join([item] * ((num_bytes - 100) // (len(item) + 1))) + end).encode()


MESSAGE = '{"role":"user","content":"x"}'
HOSTILE = {
    "messages": lambda: filled(HEAD + '"messages":[', MESSAGE, "]}"),
    "parts": lambda: filled(
        HEAD + '"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"
    ),
    "metadata": lambda: filled(HEAD + f'"messages":[{MESSAGE}],"metadata":[', "[]", "]}"),
    "nesting": lambda: (HEAD + '"metadata":' + "[" * (64 * MIB - 100)).encode(),
    "names": lambda: filled(HEAD + f'"messages":[{MESSAGE}],"metadata":{{', '"a":0', "}}"),
    "digits": lambda: (HEAD + '"seed":' + "9" * (64 * MIB - 100)).encode(),
    "text": lambda: (
        HEAD + '"messages":[{"role":"user","content":"' + "word " * (12 * MIB) + '"}]}'
    ).encode(),
    "escapes": lambda: (
        HEAD + '"messages":[{"role":"user","content":"' + "\\u00e4" * (10 * MIB) + '"}]}'
    ).encode(),
    "quotes": lambda: (HEAD + '"' * (64 * MIB - 100)).encode(),
}


SCOPE: dict[str, object] = {
    "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b"",
    "http_version": "1.1", "scheme": "http", "server": ("d", 80), "client": ("c", 1),
}  # fmt: skip


def chunks_of(body: bytes) -> Iterator[bytes]:
    return (body[i : i + CHUNK] for i in range(0, len(body), CHUNK))


async def respond(
    door: FakeDoor,
    chunks: Iterator[bytes],
    timeouts: ClientTimeouts = CLIENT_TIMEOUTS,
    *,
    stalls: bool = False,
) -> tuple[int, dict[str, str], bytes]:
    """Straight through ASGI: the cost is the application's alone. stalls: the end of the body never comes."""
    num_ends = 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal num_ends
        chunk = next(chunks, None)
        if chunk is not None:
            return {"type": "http.request", "body": chunk, "more_body": True}
        num_ends += 1
        if stalls or num_ends > 1:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await build_api(door, timeouts)(dict(SCOPE), receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize("name", HOSTILE)
def test_64_mib_of_values_or_text_cost_little(door, name):
    door.limits = LARGE
    body = HOSTILE[name]()
    assert 50 * MIB < len(body) <= 64 * MIB
    started_s = time.process_time()
    status, headers, answer = asyncio.run(respond(door, chunks_of(body)))
    spent_s = time.process_time() - started_s
    assert status == 413 and "connection" not in headers, answer
    assert json.loads(answer)["error"]["code"] == "request_too_large"
    assert spent_s < SLOW_HOST * 0.5
    assert not door.calls


@pytest.mark.parametrize(
    "body",
    [
        filled(HEAD + '"messages":[', MESSAGE, "]}", MIB),
        filled(HEAD + '"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}", MIB),
        filled(HEAD + '"messages":[{"role":"user","content":[', '{"type":"text"}', "]}]}", MIB),
        filled(HEAD + f'"messages":[{MESSAGE}],"metadata":[', "[]", "]}", 190_000),
        filled(HEAD + '"messages":[{"role":"user","content":[{"type":"text","text":"data:x;base64,"},{"type":"image_url","image_url":{"url":"', "x" * 1000, '"}}]}]}', MIB),
    ],
    ids=["messages", "parts", "wrong parts", "metadata", "url"],
)  # fmt: skip
def test_what_may_be_parsed_is_parsed_fast(door, body):
    """Under the cap of a context of 32,768 tokens, and intricate; every one is refused or answered in a
    moment of CPU time."""
    door.limits = LARGE
    started_s = time.process_time()
    response = call(door, "POST", "/v1/chat/completions", content=body)
    assert time.process_time() - started_s < SLOW_HOST * 0.5
    assert response.status_code in (200, 400, 413)


def chains(num_objects: int) -> bytes:
    """What costs most to parse: objects within objects."""
    chain = '{"a":' * 180 + "0" + "}" * 180
    return filled(HEAD + f'"messages":[{MESSAGE}],"metadata":[', chain, "]}", num_objects // 181 * 1082)


def test_the_costliest_values_are_bounded(door):
    door.limits = LARGE
    started_s = time.process_time()
    body = b'{"user":"base64,",' + chains(LARGE.max_marks)[1:]
    assert call(door, "POST", "/v1/chat/completions", content=body).status_code in (200, 400)
    assert time.process_time() - started_s < SLOW_HOST * 1.0
    response = call(door, "POST", "/v1/chat/completions", content=b'{"user":"base64,",' + chains(300_000)[1:])
    assert response.status_code == 413 and "values" in error_of(response)["message"]


def test_64_prompts_of_token_ids_and_log_probabilities_of_an_answer_are_taken(door):
    door.limits = LARGE
    body = {"model": "org/demo", "prompt": [[7] * 4000] * 64}
    assert call(door, "POST", "/v1/completions", json=body).status_code == 200
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    text = {
        "type": "output_text", "text": "a" * 600, "logprobs": [{**entry, "top_logprobs": [entry] * 20}] * 600
    }  # fmt: skip
    said = [{"role": "assistant", "content": [text]}, {"role": "user", "content": "b"}]
    assert call(door, "POST", "/v1/responses", json={"model": "org/demo", "input": said}).status_code == 200


@pytest.mark.parametrize(
    "rest",
    ["word " * (12 * MIB), "A" * (60 * MIB), r"\/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA" * MIB],
    ids=["words", "letters", "slashes"],
)
def test_media_hide_no_text(door, rest):
    """What stands behind the first item is bounded all the same."""
    door.limits = LARGE
    image = '{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}'
    body = f'{HEAD}"messages":[{{"role":"user","content":[{image},{{"type":"text","text":"{rest}"}}]}}]}}'
    started_s = time.process_time()
    status, _, answer = asyncio.run(respond(door, chunks_of(body.encode())))
    assert time.process_time() - started_s < SLOW_HOST * 1.0
    assert status == 400 and json.loads(answer)["error"]["code"] == "context_length_exceeded"


def test_a_body_over_the_cap_is_refused_by_its_declared_size(door):
    content = b"x" * (door.limits.max_body_bytes + 1)
    response = call(door, "POST", "/v1/chat/completions", content=content)
    assert response.status_code == 413 and error_of(response)["code"] == "request_too_large"


def test_a_client_that_sends_all_before_it_reads_learns_that_it_is_too_much(door):
    body = json.dumps(
        {"model": "org/demo", "messages": [{"role": "user", "content": "x" * 3_000_000}]}
    ).encode()

    async def main() -> bytes:
        async with serving(door) as address:
            host, port = address.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            for chunk in chunks_of(body):
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0.002)
            async with asyncio.timeout(60):
                answer = await reader.readuntil(b"\r\n")
            writer.transport.abort()
            return answer

    for _ in range(3):
        assert b" 413 " in asyncio.run(main())


def test_a_body_without_media_has_a_smaller_cap(door):
    text = {"model": "org/demo", "messages": [{"role": "user", "content": "x" * door.limits.max_text_bytes}]}
    response = call(door, "POST", "/v1/chat/completions", json=text)
    assert response.status_code == 413 and "without media" in error_of(response)["message"]


def media_part(name: str, data: str) -> tuple[str, dict]:
    """The path, and a part in one of the forms in which it takes media as data."""
    uri = "data:image/png;base64," + data
    return {
        "image_url": ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": uri}}),
        "input_audio": (
            "/v1/chat/completions",
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        ),
        "input_image": ("/v1/responses", {"type": "input_image", "image_url": uri}),
        "file as a URI": ("/v1/responses", {"type": "input_file", "file_data": uri}),
        "file as base64": ("/v1/responses", {"type": "input_file", "file_data": data, "filename": "a.png"}),
        "source": (
            "/v1/messages",
            {"type": "image", "source": {"data": data, "media_type": "image/png", "type": "base64"}},
        ),
    }[name]


@pytest.mark.parametrize(
    "name", ["image_url", "input_audio", "input_image", "file as a URI", "file as base64", "source"]
)
def test_media_as_data_may_be_larger_than_text(door, name):
    path, part = media_part(name, "A" * (door.limits.max_text_bytes + 1))
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "org/demo", field: [{"role": "user", "content": [part]}]}
    if path == "/v1/messages":
        body["max_tokens"] = 8
    assert call(door, "POST", path, json=body).status_code == 200 and len(door.calls[0].media) == 1


def test_text_beyond_the_context_is_refused_before_it_is_tokenised(door):
    words = "x" * (door.limits.max_text_chars // 2)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [image, {"type": "text", "text": words}, {"type": "text", "text": words + "xx"}]
    body = {"model": "org/demo", "messages": [{"role": "user", "content": parts}]}
    response = call(door, "POST", "/v1/chat/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == "messages" and not door.calls


def test_messages_and_parts_are_counted(door):
    door.limits = LARGE
    many = {"model": "org/demo", "messages": [{"role": "user", "content": "x"}] * 4097}
    assert error_of(call(door, "POST", "/v1/chat/completions", json=many))["param"] == "messages"
    parts = [{"type": "text", "text": "x"}] * 2049
    many = {"model": "org/demo", "messages": [{"role": "user", "content": parts}] * 2}
    assert "content parts" in error_of(call(door, "POST", "/v1/chat/completions", json=many))["message"]


def test_a_stalled_body_ends_with_408(door):
    status, headers, answer = asyncio.run(
        respond(door, iter([b'{"model":']), ClientTimeouts(body_s=0.05), stalls=True)
    )
    assert status == 408 and headers["connection"] == "close"
    assert json.loads(answer)["error"]["code"] == "request_timeout"


def test_a_tenant_has_half_of_the_budget_and_leaves_room_for_others():
    budget, watch = BodyBudget(1000), Watch()
    first, second, third = budget.lease(watch.name("a")), budget.lease("a"), budget.lease(watch.name("b"))
    with first, third:
        first.grow(300)
        with second:
            second.grow(200)
            with pytest.raises(OverloadedError) as caught:
                second.grow(1)
            assert caught.value.retry_after_s
            assert caught.value.message == overload.body_bytes(501, 499, 1000)
            third.grow(250)
            assert budget.num_held == 750
        first.grow(75)
        with pytest.raises(OverloadedError):
            first.grow(1)
    del first, third
    assert budget.num_held == 0 and not watch.held


def test_bodies_are_charged_until_the_answer_is_sent(door):
    door.limits = msgspec.structs.replace(door.limits, held_body_bytes=400_000)
    door.words, door.pause_s = ["x"] * 2, 600.0
    url = "data:image/png;base64," + "A" * 150_000
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "org/demo", "messages": [{"role": "user", "content": parts}]}

    async def main() -> None:
        async with serving(door) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
            waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            while not door.calls:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "overloaded"
            assert "epdg_door_body_bytes 150" in (await client.get("/metrics")).text
            waiting.cancel()
            async with asyncio.timeout(60):
                while "epdg_door_body_bytes 0.0" not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_client_that_does_not_read_is_given_up(door):
    door.words = ["x" * 100_000] * 10_000

    async def main() -> None:
        async with serving(door, ClientTimeouts(read_s=0.1)) as address:
            host, port = address.removeprefix("http://").split(":")
            body = json.dumps(
                {"model": "org/demo", "messages": [{"role": "user", "content": "x"}], "stream": True}
            ).encode()
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
            async with asyncio.timeout(60):
                await door.closed.wait()
            writer.transport.abort()
        assert door.generations[0].usage.completion_tokens < 1000

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_send_that_never_ends_ends_the_request_quietly(door, stream):
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "x"}], "stream": stream}

    async def receive() -> MutableMapping[str, Any]:
        if door.calls:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.timeout(60):
            await build_api(door, ClientTimeouts(read_s=0.05))(dict(SCOPE), receive, send)

    asyncio.run(main())
    assert all(generation.num_closed for generation in door.generations)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_is_not_given_up(door, stream):
    """However long the pauses of the answer are."""
    door.pause_s = 0.1
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    response = call(door, "POST", "/v1/chat/completions", ClientTimeouts(read_s=0.02), json=body)
    assert response.status_code == 200


class ObservedDoor(FakeDoor):
    """Notes the threads in which bodies become calls."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    @property
    def defaults(self) -> GenerationDefaults:
        self.threads.add(threading.current_thread())
        return FakeDoor.defaults


@pytest.mark.parametrize(("num_chars", "is_beside"), [(1 << 10, False), (80 << 10, True)])
def test_a_large_body_is_parsed_beside_the_event_loop(num_chars, is_beside):
    door = ObservedDoor()
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "x" * num_chars}]}
    assert call(door, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert (threading.current_thread() not in door.threads) == is_beside and door.threads
