"""A decode worker that is stopped, not dead: requests go to the other one until it moves again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time

import httpx
import pytest

from deploy.serving.launch import LocalCluster
from tests.serve.test_replicas import pid_of, until_running

GUARD_S = 60.0
SILENT = 'epdg_door_silent_workers{pool="decode"}'
pytestmark = pytest.mark.slow  # a second cluster


async def test_a_stopped_worker_is_avoided_until_it_moves(parallel: LocalCluster) -> None:
    async with (
        asyncio.timeout(4 * GUARD_S),
        httpx.AsyncClient(base_url=parallel.url, timeout=120) as client,
    ):
        await until_running(client, "decode", 2)
        early: list[asyncio.Future[int]] = []
        stopped = pid_of(parallel, "Decode")
        os.kill(stopped, signal.SIGSTOP)
        try:
            began_at = time.monotonic()
            asking = asyncio.ensure_future(keep_asking(client, early))
            await until_silent(client, 1)
            asking.cancel()
            print(f"known after {time.monotonic() - began_at:.2f} s")
            for _ in range(3):  # before Serve replaces the worker
                began_at = time.monotonic()
                assert await ask(client) == 200
                print(f"answered in {time.monotonic() - began_at:.2f} s")
        finally:
            os.kill(stopped, signal.SIGCONT)
        await until_silent(client, 0)
        assert set(await asyncio.gather(*early)) == {200}, "they go on, there or elsewhere"


async def keep_asking(client: httpx.AsyncClient, asked: list[asyncio.Future[int]]) -> None:
    """A worker is noticed when it has something to do. The other one may be preferred while it is idle, so
    several requests come at once."""
    for idx in itertools.count():
        asked += [asyncio.ensure_future(ask(client, f"{idx} plus {other}")) for other in range(4)]
        await asyncio.sleep(0.1)


async def ask(client: httpx.AsyncClient, content: str = "hello") -> int:
    body = {"model": "demo_model", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return (await client.post("/v1/chat/completions", json=body)).status_code


async def until_silent(client: httpx.AsyncClient, num_workers: int) -> None:
    """The door counts so many decode workers that do not move."""
    async with asyncio.timeout(GUARD_S):
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            if sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(SILENT)) == num_workers:
                return
            await asyncio.sleep(0.05)
