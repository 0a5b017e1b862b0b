"""What the services of all phases share: starting, draining and stopping their one worker process.

Order: made (the subclass loads its model and builds its engine) → `start` → serving → `drain` → `stop`. All
but the first run on the replica's event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.errors import ConfigError
from cluster.types.members import Member
from cluster.types.messages import LoadReport
from cluster.worker.process import WorkerProcess


class PhaseService:
    def __init__(self, process: WorkerProcess, member: Member):
        """`member`: without its address, which is known after `start`."""
        self.replica_id = member.replica_id
        self.process = process
        self._member = member
        self._assigned = member.role.phases

    async def start(self) -> Member:
        """Listens and runs; called once."""
        return msgspec.structs.replace(self._member, address=await self.process.start())

    async def drain(self, timeout_s: float) -> None:
        """`WorkerProcess.drain`."""
        await self.process.drain(timeout_s)

    async def stop(self) -> None:
        await self.process.stop()

    def assign(self, phases: Sequence[str] | None) -> None:
        """From now on new requests use this worker only for these phases of its role, as long as other
        workers do the rest; None: for all of them. What it has begun it ends. Event loop only. Raises
        ConfigError."""
        role = self._member.role
        known = {phase.value: phase for phase in role.phases}
        if phases is not None and (not phases or not known.keys() >= set(phases)):
            raise ConfigError(
                f"a {role} worker can be assigned {', '.join(sorted(known))}, not {phases}",
                param="phases_by_rank",
            )
        wanted = role.phases if phases is None else frozenset(known[name] for name in phases)
        if wanted != self._assigned:
            self._assigned = wanted
            self.process.shell.assign(wanted)

    def loads(self) -> list[LoadReport]:
        """`WorkerProcess.loads`."""
        return self.process.loads()

    def check_health(self) -> None:
        """`WorkerProcess.check_health`."""
        self.process.check_health()
