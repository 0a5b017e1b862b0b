"""One streaming request and its ledger: what the door predicted when it placed the request, and what came of
it.

Time to first token (TTFT): from handing the request to the HTTP client to the first event of the answer,
which the door sends with the first token, whether that has text yet or not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LEDGER_HEADER = "x-epdg-ledger"
BEFORE_PLACING = ("fetch", "probe", "admission", "route")  # stages of a ledger before its prediction begins


@dataclass(frozen=True)
class Call:
    """A request that is ready to be sent; `at_s` after the start of its load."""

    at_s: float
    kind: str
    body: bytes
    num_tokens: int  # of the answer: exactly so many
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Answer:
    """What came back. Instants are seconds of one clock. Exactly one of answered, refused and failed."""

    call: Call
    started_at: float = 0.0
    first_at: float | None = None
    ended_at: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)  # of the prompt; empty if the answer has none
    retry_after_s: float | None = None
    was_refused: bool = False  # 429
    failure: str = ""  # also of a refusal

    @property
    def is_answered(self) -> bool:
        return not self.failure

    @property
    def ttft_s(self) -> float:
        assert self.first_at is not None
        return self.first_at - self.started_at

    @property
    def predicted_s(self) -> tuple[float, float, float] | None:
        """(expected, low, high) time from placing to the first token; the ledger's times begin at the
        door."""
        told = self.ledger.get("predicted_ms")
        if told is None:
            return None
        expected, low, high = (
            (told[name] - self._before_placing_ms) / 1e3 for name in ("ttft", "low", "high")
        )
        return expected, low, high

    @property
    def placed_ttft_s(self) -> float:
        """What was predicted: the time from placing to the first token, on the door's clock."""
        return (self.ledger["ttft_ms"] - self._before_placing_ms) / 1e3

    @property
    def _before_placing_ms(self) -> float:
        return sum(self.stage_ms(name) for name in BEFORE_PLACING)

    def stage_ms(self, name: str) -> float:
        return self.ledger.get("actual_ms", {}).get(name, 0.0)


async def ask(session: aiohttp.ClientSession, url: str, call: Call) -> Answer:
    """Never raises for what a server does, only when cancelled."""
    answer = Answer(call, time.perf_counter())
    headers = {"Content-Type": "application/json", LEDGER_HEADER: "1", **call.headers}
    try:
        async with session.post(f"{url}/v1/chat/completions", data=call.body, headers=headers) as response:
            if response.status != 200:
                answer.was_refused = response.status == 429
                answer.retry_after_s = _seconds(response.headers.get("retry-after"))
                answer.failure = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                async for line in response.content:
                    take_line(answer, line, time.perf_counter())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}"[:200]
    answer.ended_at = time.perf_counter()
    if not answer.failure and answer.num_tokens != call.num_tokens:
        answer.failure = f"{answer.num_tokens} tokens instead of {call.num_tokens}"
    return answer


def take_line(answer: Answer, line: bytes, now: float) -> None:
    """A line of server-sent events. Raises ValueError for data that is not JSON."""
    data = line[5:].strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return
    event = json.loads(data)
    if event.get("error"):
        answer.failure = str(event["error"])[:200]
    if event.get("choices") and answer.first_at is None:
        answer.first_at = now
    if ledgers := event.get("ledger"):
        answer.ledger = ledgers[0]
    if usage := event.get("usage"):
        answer.num_tokens, answer.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None
