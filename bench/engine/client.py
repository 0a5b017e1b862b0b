"""One streaming chat request, timed on this process's monotonic clock. aiohttp; nothing here starts or judges
a server.

Time to first token (TTFT): from handing the request to the HTTP client to the first chunk with text.
Inter-token latency (ITL): the gaps between successive chunks with text. A request counts only if it brought
every token asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.engine.prompts import Message

CONNECT_TIMEOUT_S = 10.0
Clock = Callable[[], float]


@dataclass(frozen=True)
class ChatRequest:
    """What to ask: `num_tokens` of answer to `messages`. `kind` groups requests of a mixed row in the
    results.
    """

    messages: list[Message]
    num_tokens: int
    kind: str


@dataclass
class TimedAnswer:
    """The answer to one request. Instants are seconds of one clock; `failure` is empty exactly if the answer
    is complete.
    """

    kind: str
    started_at: float = 0.0
    chunks_at: list[float] = field(default_factory=list)  # arrival of each chunk with text
    ended_at: float = 0.0
    num_prompt_tokens: int = 0  # this count and the next two are the server's
    num_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, as the server says; 0 if it does not
    text: str = ""
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunks_at[0] - self.started_at

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunks_at, self.chunks_at[1:], strict=False)]


@dataclass(frozen=True)
class Endpoint:
    """A server's address, and the fields besides the common ones that it needs to force an answer's
    length."""

    url: str
    model_id: str
    extra_fields: Mapping[str, Any]

    def body(self, request: ChatRequest) -> dict[str, Any]:
        return {
            "model": self.model_id,
            "messages": request.messages,
            "max_tokens": request.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields_for(request.num_tokens),
        }

    def fields_for(self, num_tokens: int) -> dict[str, Any]:
        """`extra_fields`, with `num_tokens` in the place of each None."""
        return {name: num_tokens if value is None else value for name, value in self.extra_fields.items()}


def open_session() -> aiohttp.ClientSession:
    """One connection per request, without a limit on their number; the caller bounds the time."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=1 << 20,
    )


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    request: ChatRequest,
    record: TimedAnswer | None = None,
) -> TimedAnswer:
    """Raises nothing for what a server does; a refusal or a broken stream becomes the answer's `failure`.

    A caller that reads the answer while it arrives passes the `record` that it is written to.
    """
    data = json.dumps(endpoint.body(request)).encode()  # before the clock starts
    headers = {"Content-Type": "application/json"}
    record = record or TimedAnswer(request.kind)
    record.started_at = time.perf_counter()
    try:
        url = f"{endpoint.url}/v1/chat/completions"
        async with session.post(url, data=data, headers=headers) as response:
            if response.status != 200:
                record.failure = f"HTTP {response.status}: {(await response.text())[:200]}"
                return record
            await read_stream(response.content, record, time.perf_counter)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        record.failure = f"{type(error).__name__}: {error}"[:200]
    record.ended_at = time.perf_counter()
    judge(record, request.num_tokens)
    return record


def judge(record: TimedAnswer, num_tokens: int) -> None:
    """Sets `failure` unless the answer has every token asked for, and text."""
    if record.failure:
        return
    if record.num_tokens != num_tokens:
        record.failure = f"{record.num_tokens} tokens instead of {num_tokens}"
    elif not record.chunks_at:
        record.failure = "no text"


async def read_stream(lines: AsyncIterable[bytes], record: TimedAnswer, clock: Clock) -> None:
    """Reads server-sent events line by line into the record. Raises ValueError for data that is not JSON."""
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data != b"[DONE]":
            take_event(json.loads(data), record, clock())


def take_event(event: dict[str, Any], record: TimedAnswer, now: float) -> None:
    if event.get("error"):
        record.failure = str(event["error"])[:200]
    if usage := event.get("usage"):
        record.num_tokens = usage["completion_tokens"]
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in event.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            record.chunks_at.append(now)
            record.text += text
