"""A door and its workers in this process, without Ray. Transfers stay in the process, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from cluster.config.settings import ClusterArgs
from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from cluster.worker.setup import WorkerSetup, set_up
from deploy.serving.ports import free_port
from encoder_service.service import EncoderService
from router.api.app import build_api
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ServedModels
from router.door import Door

START_TIMEOUT_S = 10.0

Service = EncoderService | LanguageWorker


def setup_here(args: ClusterArgs, replica_id: str) -> WorkerSetup:
    """What a worker of this process knows before it is built."""
    return set_up(args, replica_id, transport="in_process")


@asynccontextmanager
async def started(door: Door, services: Sequence[Service]) -> AsyncIterator[None]:
    """Starts the services and connects the door to all of them; stops everything when the block ends."""
    members = [await service.start() for service in services]
    for role in Role:
        door.update_members(role, [member for member in members if member.role is role])
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(door.peers) < len(members):
                await asyncio.sleep(0.005)
        yield
    finally:
        await door.aclose()
        for service in services:
            await service.stop()


async def choice_of(door: Door, body: Mapping[str, Any]) -> Any:
    """The only choice of a chat request, as the door's API would make it of this body: its deltas, its usage,
    and `aclose`. Raises RequestError."""
    context = CallContext(ServedModels(str(body["model"])), door.defaults)
    (choice,) = await door.chat(chat_call(ChatRequest.model_validate(body), context))
    return choice


@asynccontextmanager
async def api(door: Door) -> AsyncIterator[str]:
    """HTTP before the door. Yields the URL."""
    port = free_port()
    config = uvicorn.Config(build_api(door), host="127.0.0.1", port=port, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started:
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
