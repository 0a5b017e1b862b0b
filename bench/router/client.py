"""One streaming request and its ledger: what the door predicted when it placed the request, and what came of
it.

Time to first token (TTFT): from handing the request to the HTTP client to the first event of the answer,
which the door sends with the first token, whether that has text yet or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from bench.client import TimedAnswer, post

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


@dataclass(kw_only=True)
class Answer(TimedAnswer):
    """What came back. Exactly one of answered, refused and failed."""

    call: Call

    @property
    def was_refused(self) -> bool:
        return self.status == 429

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
    answer = Answer(call.kind, call=call)
    await post(session, url, call.body, answer, **{LEDGER_HEADER: "1"}, **call.headers)
    if not answer.failure and answer.num_tokens != call.num_tokens:
        answer.failure = f"{answer.num_tokens} tokens instead of {call.num_tokens}"
    return answer
