"""What the services of all phases share: starting, draining and stopping their one worker process.

Order: made (the subclass loads its model and builds its engine) → `start` → serving → `drain` → `stop`. All
but the first run on the replica's event loop.
"""

from __future__ import annotations

import msgspec

from cluster.types.members import Member
from cluster.worker.process import WorkerProcess


class PhaseService:
    def __init__(self, process: WorkerProcess, member: Member):
        """`member`: without its address, which is known after `start`."""
        self.replica_id = member.replica_id
        self._process = process
        self._member = member

    async def start(self) -> Member:
        """Listens and runs; called once."""
        return msgspec.structs.replace(self._member, address=await self._process.start())

    async def drain(self, timeout_s: float) -> None:
        """`WorkerProcess.drain`."""
        await self._process.drain(timeout_s)

    async def stop(self) -> None:
        await self._process.stop()

    def check_health(self) -> None:
        """`WorkerProcess.check_health`."""
        self._process.check_health()
