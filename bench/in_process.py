"""A door and its workers in this process, without Ray. Transfers stay in the process, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cluster.config.settings import ClusterArgs
from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from cluster.worker.setup import WorkerSetup, set_up
from encoder_service.service import EncoderService
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
