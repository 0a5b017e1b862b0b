"""APIs on loopback, behind a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from router.api.app import build_api
from router.http.limits import CLIENT_TIMEOUTS, ClientTimeouts
from tests.fakes.fake_door import FakeDoor


@contextlib.asynccontextmanager
async def serving(door: FakeDoor, timeouts: ClientTimeouts = CLIENT_TIMEOUTS) -> AsyncIterator[str]:
    """A real HTTP server on loopback; afterwards every generation must have been closed."""
    async with serving_api(build_api(door, timeouts)) as url:
        yield url
    assert all(generation.num_closed for generation in door.generations)


@contextlib.asynccontextmanager
async def serving_api(api: FastAPI) -> AsyncIterator[str]:
    """Any API's on loopback."""
    # asyncio sends at once (TCP_NODELAY) only on sockets that say that they are TCP: else 40 ms an answer
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(api, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
