"""A decode worker that is stopped, not dead: requests go to the other one until it moves again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx

from tests.serve.conftest import running
from tests.serve.test_replicas import pid_of

GUARD_S = 60.0


async def test_a_stopped_worker_is_avoided_until_it_moves(tmp_path: Path) -> None:
    with running(tmp_path, Decode=2) as local:
        async with asyncio.timeout(4 * GUARD_S), httpx.AsyncClient(base_url=local.url, timeout=120) as client:
            await until(client, 'epdg_worker_running{pool="decode"', 2, count=True)
            stopped = pid_of(local, "Decode")
            os.kill(stopped, signal.SIGSTOP)
            try:
                early = [asyncio.ensure_future(ask(client)) for _ in range(6)]
                began_at = time.monotonic()
                await until(client, 'epdg_door_silent_workers{pool="decode"}', 1)
                print(f"known after {time.monotonic() - began_at:.2f} s")
                for _ in range(12):
                    began_at = time.monotonic()
                    assert await ask(client) == 200
                    print(f"answered in {time.monotonic() - began_at:.2f} s")
            finally:
                os.kill(stopped, signal.SIGCONT)
            await until(client, 'epdg_door_silent_workers{pool="decode"}', 0)
            assert set(await asyncio.gather(*early)) == {200}, "they go on with their worker"


async def ask(client: httpx.AsyncClient) -> int:
    body = {"model": "demo_model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    return (await client.post("/v1/chat/completions", json=body)).status_code


async def until(client: httpx.AsyncClient, name: str, wanted: int, *, count: bool = False) -> None:
    """A metric has a value, or so many lines begin with its name."""
    async with asyncio.timeout(GUARD_S):
        while True:
            lines = [
                line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(name)
            ]
            if (len(lines) if count else sum(float(line.rsplit(" ", 1)[1]) for line in lines)) == wanted:
                return
            await asyncio.sleep(0.05)
