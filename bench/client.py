"""One chat request over HTTP, timed on this host's monotonic clock, which all of its processes share; by
aiohttp. Nothing here starts or judges a server.

Time to first token (TTFT): from handing the request to the HTTP client to the first chunk with text.
Inter-token latency (ITL): the gaps between successive chunks with text. A request counts only if it brought
every token asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from bench.metrics import model_id

CONNECT_TIMEOUT_S = 10.0
MOST_SAID = 200  # characters of a failure
NO_END: Mapping[str, Any] = {"ignore_eos": False, "min_tokens": None}  # forces the length of an answer
Clock = Callable[[], float]
Given = TypeVar("Given", bound="TimedAnswer")
Message = dict[str, Any]


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
    num_prompt_tokens: int = 0  # this count and the next two are the server's, of all choices
    num_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, as the server says; 0 if it does not
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)  # why each choice has ended
    first_at: float | None = None  # arrival of the first event of a choice, with text or without
    ledger: dict[str, Any] = field(default_factory=dict)  # of the prompt; empty if the answer has none
    status: int = 0  # of the response; 0: none came
    retry_after_s: float | None = None
    is_over: bool = False  # the last line of the stream has come
    failure: str = ""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts.get(0, "")

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """(text, finish reason) of each choice that has ended."""
        return tuple((self.texts.get(i, ""), self.reasons[i]) for i in sorted(self.reasons))

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


def endpoint(url: str) -> Endpoint:
    """Our own cluster, which generates exactly as many tokens as asked for. Blocks; raises
    httpx.HTTPError."""
    return Endpoint(url, model_id(url), NO_END)


def open_session(total_s: float | None = None, *, keeps_connections: bool = False) -> aiohttp.ClientSession:
    """One connection per request unless connections are kept, as clients' libraries do; without a limit on
    their number. `total_s`: of a request; None: the caller bounds the time."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=not keeps_connections),
        read_bufsize=1 << 20,
    )


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, answer: TimedAnswer, **headers: str
) -> None:
    """Sends a chat request and writes what comes back to `answer` while it arrives: a stream, or a whole
    answer. Raises nothing for what a server does, only when cancelled; a refusal or a broken stream becomes
    the answer's `failure`."""
    kind = {"Content-Type": "application/json"}
    answer.started_at = time.monotonic()
    try:
        url = f"{url}/v1/chat/completions"
        async with session.post(url, data=body, headers=kind | headers) as response:
            answer.status = response.status
            if response.status != 200:
                answer.retry_after_s = _seconds(response.headers.get("retry-after"))
                answer.failure = f"HTTP {response.status}: {_message(await response.text())}"
            elif response.content_type == "text/event-stream":
                await read_stream(response.content, answer, time.monotonic)
            else:
                take_whole(await response.json(), answer)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        answer.failure = f"{type(error).__name__}: {error}"[:MOST_SAID]
    answer.ended_at = time.monotonic()


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    request: ChatRequest,
    record: TimedAnswer | None = None,
) -> TimedAnswer:
    """Sends as `post` does; an answer without every token asked for, or without text, has failed, too.

    A caller that reads the answer while it arrives passes the `record` that it is written to.
    """
    data = json.dumps(endpoint.body(request)).encode()  # before the clock starts
    record = record or TimedAnswer(request.kind)
    await post(session, endpoint.url, data, record)
    judge(record, request.num_tokens)
    return record


async def answers_in_time(
    asked: Iterable[Coroutine[Any, Any, Given]], timeout_s: float
) -> list[Given | None]:
    """What came of each; None: nothing in time, so it was cancelled."""
    tasks = [asyncio.create_task(each) for each in asked]
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [None if task in late else task.result() for task in tasks]


def judge(record: TimedAnswer, num_tokens: int) -> None:
    """Sets `failure` unless the answer has every token asked for, and text."""
    if record.failure:
        return
    if record.num_tokens != num_tokens:
        record.failure = f"{record.num_tokens} tokens instead of {num_tokens}"
    elif not record.chunks_at:
        record.failure = "no text"


async def read_stream(lines: AsyncIterable[bytes], record: TimedAnswer, clock: Clock) -> None:
    """Reads server-sent events line by line into the record. Raises ValueError for data that is not JSON,
    KeyError for an event of another form."""
    async for line in lines:
        data = line[5:].strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            record.is_over = True
        else:
            take_event(json.loads(data), record, clock())


def take_event(event: dict[str, Any], record: TimedAnswer, now: float) -> None:
    if event.get("error"):
        record.failure = f"error event: {_message(json.dumps(event))}"
    if usage := event.get("usage"):
        _take_usage(usage, record)
    if ledgers := event.get("ledger"):
        record.ledger = ledgers[0]
    choices = event.get("choices") or ()
    if choices and record.first_at is None:
        record.first_at = now
    for choice in choices:
        idx = choice.get("index", 0)
        if text := (choice.get("delta") or {}).get("content"):
            record.chunks_at.append(now)
            record.texts[idx] = record.texts.get(idx, "") + text
        if choice.get("finish_reason") is not None:
            record.reasons[idx] = choice["finish_reason"]


def take_whole(answer: Mapping[str, Any], record: TimedAnswer) -> None:
    """An answer that is no stream. Raises KeyError for another form."""
    for choice in answer["choices"]:
        record.texts[choice["index"]] = choice["message"]["content"]
        record.reasons[choice["index"]] = choice["finish_reason"]
    _take_usage(answer["usage"], record)


def _take_usage(usage: Mapping[str, Any], record: TimedAnswer) -> None:
    record.num_tokens, record.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _message(text: str) -> str:
    """The message of an error in OpenAI's form; else the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])[:MOST_SAID]
    except (ValueError, KeyError, TypeError):
        return f"not in OpenAI's form: {text[:MOST_SAID]!r}"


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None
