"""One request and what came of it; a load of many; the front's own availability. Instants are seconds of
`time.monotonic`, which all processes of this machine share."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.chaos.calls import ChaosCall

PAUSE_AFTER_LOSS_S = 0.5  # of a client: a front that is away is not asked thousands of times
PROBE_PERIOD_S, PROBE_TIMEOUT_S = 0.1, 1.0

Choices = tuple[tuple[str, str | None], ...]  # (text, finish reason) of each choice


@dataclass
class Sending:
    """One sending of a call. `loss`: why there is no complete answer; empty if there is one."""

    call: ChaosCall
    started_at: float
    ended_at: float = 0.0
    chunks_at: list[float] = field(default_factory=list)  # arrivals of text, of a stream
    choices: Choices = ()
    num_tokens: int = 0  # of all choices, as the server counts
    loss: str = ""

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two arrivals of text."""
        return max((b - a for a, b in zip(self.chunks_at, self.chunks_at[1:], strict=False)), default=0.0)

    @property
    def is_complete(self) -> bool:
        return not self.loss


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """Connections are kept, as clients' libraries do."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    )


async def send(
    session: aiohttp.ClientSession, url: str, model_id: str, salt: str, sending: Sending
) -> Sending:
    """Fills in the record. Raises nothing for what a server does, only when cancelled."""
    body = sending.call.body(model_id, salt)
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                sending.loss = f"HTTP {response.status}: {_message(await response.text())}"
            elif sending.call.is_streamed:
                await read_stream(response.content, sending)
            else:
                _take_whole(await response.json(), sending)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        sending.loss = f"{type(error).__name__}: {error}"[:160]
    sending.ended_at = time.monotonic()
    return sending


async def read_stream(lines: AsyncIterable[bytes], sending: Sending) -> None:
    """Raises ValueError for data that is not JSON, KeyError for an event of another form."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str | None] = {}
    is_over = False
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_over = True
            continue
        event = json.loads(data)
        if error := event.get("error"):
            sending.loss = f"error event: {_message(json.dumps({'error': error}))}"
            return
        if usage := event.get("usage"):
            sending.num_tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                sending.chunks_at.append(time.monotonic())
                texts.setdefault(choice["index"], []).append(text)
            if choice["finish_reason"] is not None:
                reasons[choice["index"]] = choice["finish_reason"]
    if not is_over:
        sending.loss = "the stream ended early"
    sending.choices = tuple(("".join(texts.get(i, ())), reasons[i]) for i in sorted(reasons))


def _take_whole(answer: Mapping[str, Any], sending: Sending) -> None:
    ordered = sorted(answer["choices"], key=lambda choice: choice["index"])
    sending.choices = tuple((each["message"]["content"], each["finish_reason"]) for each in ordered)
    sending.num_tokens = answer["usage"]["completion_tokens"]


def _message(text: str) -> str:
    """The message of an error in OpenAI's form; else the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])[:160]
    except (ValueError, KeyError, TypeError):
        return f"not in OpenAI's form: {text[:80]!r}"


class Load:
    """So many clients, each of which sends one call after the other until `stop`. Sendings are recorded when
    they start."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model_id: str, name: str):
        self.sendings: list[Sending] = []
        self._session, self._url, self._model_id, self._name = session, url, model_id, name
        self._is_stopping = False
        self._clients: list[asyncio.Task[None]] = []

    def start(self, calls: Iterator[ChaosCall], concurrency: int) -> None:
        self._clients = [asyncio.create_task(self._client(calls)) for _ in range(concurrency)]

    async def stop(self) -> None:
        """Waits for the requests in flight."""
        self._is_stopping = True
        await asyncio.gather(*self._clients)

    @property
    def num_ended(self) -> int:
        return sum(sending.ended_at > 0 for sending in self.sendings)

    async def until(self, is_true: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it became true in time, or the clients have nothing left to send."""
        deadline = time.monotonic() + timeout_s
        while not is_true() and not all(client.done() for client in self._clients):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _client(self, calls: Iterator[ChaosCall]) -> None:
        for call in calls:
            if self._is_stopping:
                return
            sending = Sending(call, time.monotonic())
            self.sendings.append(sending)
            salt = f"{self._name} {len(self.sendings)}"
            await send(self._session, self._url, self._model_id, salt, sending)
            if not sending.is_complete:
                await asyncio.sleep(PAUSE_AFTER_LOSS_S)


class FrontProbe:
    """Asks the front for /health again and again: how long does no door answer there? A 503 is an answer."""

    def __init__(self, url: str):
        self.away_s = 0.0  # the longest time between two answers
        self._url = url
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FrontProbe:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        answered_at = time.monotonic()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                try:
                    async with session.get(f"{self._url}/health") as response:
                        if response.status in (200, 503):
                            answered_at = time.monotonic()
                except (TimeoutError, aiohttp.ClientError, OSError):
                    pass
                self.away_s = max(self.away_s, time.monotonic() - answered_at)
                await asyncio.sleep(PROBE_PERIOD_S)
