"""A load of many calls and what came of each; the front's own availability. Instants are seconds of
`time.monotonic`, which all processes of this machine share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import aiohttp

from bench.chaos.calls import ChaosCall
from bench.client import TimedAnswer, post

PAUSE_AFTER_LOSS_S = 0.5  # of a client: a front that is away is not asked thousands of times
PROBE_PERIOD_S, PROBE_TIMEOUT_S = 0.1, 1.0

Choices = tuple[tuple[str, str], ...]  # (text, finish reason) of each choice


@dataclass(kw_only=True)
class Sending(TimedAnswer):
    """One sending of a call. `failure`: why there is no complete answer; empty if there is one."""

    call: ChaosCall

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two arrivals of text."""
        return max(self.gaps_s, default=0.0)


def sending_of(call: ChaosCall) -> Sending:
    return Sending(call.kind, time.monotonic(), call=call)


async def send(
    session: aiohttp.ClientSession, url: str, model_id: str, salt: str, sending: Sending
) -> Sending:
    """Fills in the record. Raises nothing for what a server does, only when cancelled."""
    await post(session, url, sending.call.body(model_id, salt), sending)
    judge(sending)
    return sending


def judge(sending: Sending) -> None:
    """Sets `failure` of a stream without its last line."""
    if not sending.failure and sending.call.is_streamed and not sending.is_over:
        sending.failure = "the stream ended early"


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
            sending = sending_of(call)
            self.sendings.append(sending)
            salt = f"{self._name} {len(self.sendings)}"
            await send(self._session, self._url, self._model_id, salt, sending)
            if sending.failure:
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
