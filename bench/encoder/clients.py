"""Requests that are sent at the same moment, and their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client import ChatRequest, Endpoint, TimedAnswer, answers_in_time, ask, open_session
from bench.engine.prompts import Part

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Tally:
    """Every request is in exactly one of the first three counts."""

    num_answered: int
    num_refused: int  # 429, with Retry-After
    num_failed: int  # anything else
    num_different: int  # different texts among the answers
    failures: tuple[str, ...]  # the first three different ones


def at_once(endpoint: Endpoint, requests: Sequence[ChatRequest]) -> list[TimedAnswer]:
    """Records in the order of the requests. Blocks; a request that is not answered in TIMEOUT_S has
    failed.
    """
    return asyncio.run(_at_once(endpoint, requests))


async def _at_once(endpoint: Endpoint, requests: Sequence[ChatRequest]) -> list[TimedAnswer]:
    async with open_session() as session:
        asked = (ask(session, endpoint, request) for request in requests)
        answers = await answers_in_time(asked, TIMEOUT_S)
    return [
        answer or TimedAnswer(request.kind, failure=f"no answer in {TIMEOUT_S:.0f} s")
        for request, answer in zip(requests, answers, strict=True)
    ]


def tally(records: Sequence[TimedAnswer]) -> Tally:
    answers = [record.text for record in records if not record.failure]
    refused = [record for record in records if record.failure.startswith("HTTP 429")]
    failures = Counter(record.failure for record in records if record.failure and record not in refused)
    return Tally(len(answers), len(refused), failures.total(), len(set(answers)), tuple(failures)[:3])


def required(records: Sequence[TimedAnswer]) -> Sequence[TimedAnswer]:
    """The records. Raises RuntimeError if one of them failed, because the times of the others then mean
    nothing.
    """
    for record in records:
        if record.failure:
            raise RuntimeError(f"{record.kind}: {record.failure}")
    return records


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def request(kind: str, num_tokens: int, *parts: Part) -> ChatRequest:
    """One user message with these parts."""
    return ChatRequest([{"role": "user", "content": list(parts)}], num_tokens, kind)
