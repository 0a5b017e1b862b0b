"""Sends calls to a door: at their instants whatever the answers (open loop), or so many at a time (closed
loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import aiohttp

from bench.client import answers_in_time, open_session
from bench.router.client import Answer, Call, ask

TIMEOUT_S = 120.0  # of a load, beyond its last call


async def open_loop(url: str, calls: Sequence[Call]) -> list[Answer]:
    """Answers in the order of the calls. What has no answer TIMEOUT_S after the last call is a failure."""
    started_at = time.monotonic()

    async with open_session() as session:

        async def send(call: Call) -> Answer:
            await asyncio.sleep(started_at + call.at_s - time.monotonic())
            return await ask(session, url, call)

        last_s = max(call.at_s for call in calls)
        answers = await answers_in_time(map(send, calls), last_s + TIMEOUT_S)
    return [
        answer or Answer(call.kind, call=call, failure="no answer in time")
        for call, answer in zip(calls, answers, strict=True)
    ]


async def capacity(url: str, calls: Sequence[Call], concurrency: int) -> float:
    """Answers per second while that many clients ask one call after the other. Raises RuntimeError when one
    fails."""
    answers: list[Answer] = []
    async with open_session() as session:
        waiting = iter(calls)
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(_client(session, url, waiting, answers) for _ in range(concurrency)))
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise RuntimeError(f"a request failed: {failures[0]}")
    return steady_rate([answer.ended_at for answer in answers], concurrency)


def steady_rate(ended_at: Sequence[float], concurrency: int) -> float:
    """Ends per second, without the first and the last `concurrency`: then not all clients were busy. Needs
    some more than twice that."""
    ordered = sorted(ended_at)[concurrency : len(ended_at) - concurrency]
    if len(ordered) < 2:
        raise ValueError(f"{len(ended_at)} requests are too few for {concurrency} clients")
    return (len(ordered) - 1) / (ordered[-1] - ordered[0])


async def _client(
    session: aiohttp.ClientSession, url: str, waiting: Iterator[Call], answers: list[Answer]
) -> None:
    for call in waiting:
        answers.append(await ask(session, url, call))
