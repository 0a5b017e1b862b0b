"""The page in Chromium, in front of a scripted door: streams piece by piece, tool calls, keys alone, a narrow
screen, both colour schemes, an API key, errors in words, and text that looks like markup."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.chromium import ANSWER, BINARY, HANG_S, answer, ask, page
from cluster.config.environment import read_environment
from cluster.config.settings import AccessArgs
from cluster.errors import OverloadedError
from router.api.app import build_api
from router.http.keys import Access
from tests.fakes.fake_door import FakeDoor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="there is no Chromium (Debian: apt-get install chromium)"),
]
MODEL = FakeDoor.models.model_id


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", port)) as listener:
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_a_stream_grows_piece_by_piece_and_escape_stops_it():
    door = FakeDoor([f"w{idx} " for idx in range(10_000)])
    door.pause_s = 0.02
    async with serving(build_api(door)) as url, page(url, MODEL) as tab:
        await ask(tab, "hello")
        text = f"{ANSWER}.querySelector('.text').textContent"
        first = await tab.until(text)
        await tab.until(f"{text}.length > {len(first)}")
        assert await tab.value(f"{ANSWER}.getAttribute('aria-busy')") == "true"
        assert await tab.value("document.getElementById('send').textContent") == "Stop"
        await tab.press("Escape")
        await answer(tab)
        assert "stopped" in await tab.value(f"{ANSWER}.textContent")
        async with asyncio.timeout(HANG_S):
            await door.closed.wait()


async def test_text_that_looks_like_markup_stays_text():
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b>"
    async with serving(build_api(FakeDoor([hostile, ""]))) as url, page(url, MODEL) as tab:
        await ask(tab, hostile)
        assert await answer(tab) == hostile
        assert await tab.value("document.querySelector('.question p').textContent") == hostile
        assert await tab.value("document.querySelectorAll('#log .error').length") == 0
        assert await tab.value("document.querySelectorAll('#log img, #log script, #log b').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_narrow_screen_never_scrolls_sideways_and_colours_follow_the_scheme(scheme):
    words = ["long " * 50, "word" * 50, ""]
    async with (
        serving(build_api(FakeDoor(words))) as url,
        page(url, MODEL, width=360, height=740, scheme=scheme) as tab,
    ):
        await ask(tab, "question" * 30)
        await answer(tab)
        await tab.value("document.querySelector('details').open = true")
        assert await tab.value("document.documentElement.scrollWidth") == 360
        colours = await tab.value(
            "[document.body, ...document.querySelectorAll('.quiet, #log p, button, label')].map((element) =>"
            " [getComputedStyle(element).color, groundOf(element)]);"
            "function groundOf(element) { const own = getComputedStyle(element).backgroundColor;"
            " return own === 'rgba(0, 0, 0, 0)' ? groundOf(element.parentElement) : own; }"
        )
        worst = min(contrast(rgb(ink), rgb(ground)) for ink, ground in colours)
        assert worst >= 4.5, colours
        (_, ground), *_ = colours
        assert (luminance(rgb(ground)) > 0.5) is (scheme == "light")


def rgb(text: str) -> list[float]:
    return [float(part) / 255 for part in text.removeprefix("rgb(").removesuffix(")").split(",")]


def luminance(colour: list[float]) -> float:
    """WCAG 2.2"""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


async def test_everything_can_be_done_with_keys_alone():
    async with serving(build_api(FakeDoor(["fine", ""]))) as url, page(url, MODEL) as tab:
        reached = []
        focused = (
            "document.activeElement.id || document.activeElement.tagName + document.activeElement.className"
        )
        for _ in range(9):
            await tab.press("Tab")
            reached.append(await tab.value(focused))
        assert reached == ["Askip", "open-key", "log", "prompt", "files", "clear", "send", "SUMMARY", "BODY"]
        await tab.press("Tab")
        assert await tab.value(focused) == "Askip"
        await tab.press("Enter")
        await tab.until(f"{focused} === 'prompt'")
        await tab.type("first line")
        await tab.press("Enter", shift=True)
        await tab.type("second line")
        await tab.press("Enter")
        assert await answer(tab) == "fine"
        assert (
            await tab.value("document.querySelector('.question p').textContent") == "first line\nsecond line"
        )
        for _ in range(4):
            await tab.press("Tab")
        await tab.press("Enter")
        assert await tab.value("document.querySelector('details').open")


class Scripted:
    """In front of the API: answers call a tool."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/chat/completions":
            await StreamingResponse(tool_events(), media_type="text/event-stream")(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def tool_events() -> AsyncIterator[str]:
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "paint", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"shape": "cir'}},
        {"index": 0, "function": {"arguments": 'cle"}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
    ]
    for piece in pieces:
        chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    placement = {"encoders": ["e7", "e7"], "prefill": "p2", "decode": "d5", "codec": "int8"}
    ledger = {"ttft_ms": 30.0, "actual_ms": {"admission": 0.0, "prefill": 30.0}, "placement": placement}
    for last in (
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "ledger": [ledger]},
    ):
        yield f"data: {json.dumps(last)}\n\n"
    yield "data: [DONE]\n\n"


async def test_the_page_asks_for_a_key_sends_it_and_shows_tool_calls():
    door = FakeDoor()
    door.access = Access.load(AccessArgs(), read_environment({"EPDG_API_KEY": "secret"}))
    async with serving(Scripted(build_api(door))) as url, page(url, None) as tab:
        await tab.until("document.getElementById('key-dialog').open")
        assert "API key" in await tab.value("document.getElementById('key-why').textContent")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until("document.getElementById('key-dialog').open")
        await tab.until("document.getElementById('key-why').textContent.includes('The API key was refused.')")
        await tab.type("secret")
        await tab.press("Enter")
        await tab.until(f"document.getElementById('model').textContent === '{MODEL}'")
        await tab.until("document.querySelector('.pool.decode') !== null")
        await ask(tab, "paint")
        await answer(tab)
        calls = await tab.value("[...document.querySelectorAll('.tool')].map((call) => call.textContent)")
        assert calls == ['calls paint{\n  "shape": "circle"\n}', "calls wait{}"]
        rows = await tab.value(
            "[...document.querySelectorAll('#ledger li, #ledger tbody th')].map((row) => row.textContent)"
        )
        assert rows == ["Prefill", "e7 sends embeddings to p2", "p2 sends KV (int8) to d5"]


async def test_errors_are_words_that_help():
    door = FakeDoor()
    door.error, door.fail_at = OverloadedError("try later", retry_after_s=7), None
    async with serving(build_api(door)) as url, page(url, MODEL) as tab:
        await ask(tab, "hello")
        assert await answer(tab) == (
            "The cluster has more requests than it can serve in time. Try later. Try again in 7 s."
        )
        assert await tab.value(f"{ANSWER}.querySelector('[role=alert]') !== null")
        await tab.until("document.getElementById('prompt').value === 'hello'")  # to be sent again
        await tab.value("document.getElementById('schema').value = '{'")
        await tab.value("document.getElementById('prompt').focus()")
        await tab.type("hello")
        await tab.press("Enter")
        await tab.until(
            "document.getElementById('notice').textContent.includes('JSON schema is not valid JSON')"
        )
        assert len(door.calls) == 1


async def test_a_server_that_is_gone_is_named_and_found_again():
    async with contextlib.AsyncExitStack() as stack:
        async with serving(build_api(FakeDoor())) as url:
            tab = await stack.enter_async_context(page(url, MODEL))
        await tab.until(
            "document.getElementById('pools').textContent.includes('Is `epdg serve` still running?')"
        )
        await ask(tab, "hello")
        assert "cannot be reached" in await answer(tab)
        async with serving(build_api(FakeDoor()), port=int(url.rpartition(":")[2])):
            await tab.until("document.querySelector('.pool.decode') !== null")
            await tab.press("Enter")
            await tab.until(f"{ANSWER}.textContent.includes('Hello wörld')")


async def test_files_are_chosen_pasted_and_removed_and_other_files_are_named(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    names = "[...document.querySelectorAll('#attachments li > span')].map((name) => name.textContent)"
    async with serving(build_api(FakeDoor())) as url, page(url, MODEL) as tab:
        await tab.choose("#files", tmp_path / "cat.png", tmp_path / "notes.txt")
        await tab.until(f"{names}.length === 1")
        assert "notes.txt is no image" in await tab.value("document.getElementById('notice').textContent")
        await tab.value(
            "(() => { const data = new DataTransfer();"
            " data.items.add(new File(['x'], 'a.wav', { type: 'audio/wav' }));"
            " dispatchEvent(new ClipboardEvent('paste', { clipboardData: data })); })()"
        )
        await tab.until(f"{names}.length === 2")
        await tab.value("document.querySelector('[aria-label=\"Remove cat.png\"]').click()")
        assert await tab.value(names) == ["a.wav"]


async def test_a_hidden_page_asks_nothing():
    door = FakeDoor()
    num_asked = 0

    def pools() -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        return {"num_running": 0, "num_waiting": 0, "pools": []}

    door.pools = pools
    show = (
        "Object.defineProperty(document, 'hidden', { configurable: true, value: %s });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    async with serving(build_api(door)) as url, page(url, MODEL) as tab:
        await tab.value(show % "true")
        await asyncio.sleep(0.5)  # what was under way has arrived
        before = num_asked
        await asyncio.sleep(2.5)
        assert num_asked == before
        await tab.value(show % "false")
        async with asyncio.timeout(HANG_S):
            while num_asked <= before + 1:
                await asyncio.sleep(0.05)
