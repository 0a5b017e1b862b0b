"""A cluster: doors, workers, the networks between them, and what Ray Serve does for it (lists of replicas,
replacement of those that have ended)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cluster.ids
from cluster.config.settings import AdmissionArgs
from cluster.errors import UnavailableError
from cluster.kvcache.memory import BlockMemory
from cluster.types.members import Role
from cluster.types.messages import DecodeTarget, EncodeTarget
from tests.histories.agents import SimulatedAgent, SimulatedWrite, TransferNetwork
from tests.histories.clients import Clients
from tests.histories.doors import SimulatedDoor
from tests.histories.network import End, Network
from tests.histories.placements import ScatteredPolicy
from tests.histories.scheduler import Scheduler, SimulatedProcess, SimulatedThread, SkewedClock
from tests.histories.workers import SimulatedWorker, Sizes, WorkerHost

DIAL_S = 0.001


@dataclass(frozen=True)
class Shape:
    """What a cluster consists of."""

    roles: tuple[Role, ...]
    num_doors: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    scattered: float = 0.0  # the share of placements that are drawn, of those that are possible
    admission: AdmissionArgs = field(default_factory=lambda: AdmissionArgs(max_outstanding_s=1e9))
    is_one_host: bool = True  # the end of a process is known to all others
    drafts: float = 0.0  # the share of guesses that are right; 0: none
    overcommit: int = 1  # doors believe that workers have so many times the blocks: answers are preempted
    skew: bool = False


class World(WorkerHost):
    def __init__(self, rng: Random, shape: Shape):
        self.rng, self.shape, self.sizes = rng, shape, shape.sizes
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, rng)
        self.transfers = TransferNetwork(self.scheduler, rng, self.network.is_parted)
        self.transfers.check_landing = self.check_landing
        self.transfers.stop = self.stop_for
        self.clients = Clients(lambda: 0.0002 + (0.5 if rng.random() < 0.02 else 0.0))
        self.delay_s = lambda: 0.0001 + 0.0005 * rng.random()
        self.slow_s = lambda: 0.001 + 0.01 * rng.random()
        self.workers: dict[str, SimulatedWorker] = {}  # live ones, by replica id
        self.doors: list[SimulatedDoor] = []  # live ones
        self.draining: list[SimulatedWorker] = []  # not listed any more, and still running
        self.past_workers: list[SimulatedWorker] = []  # killed
        self.num_killed = 0
        self.ended_at: dict[SimulatedProcess, float] = {}  # of those that were killed
        self.num_late_writes = self.num_media_at_decode = 0
        self.num_expired = 0  # leases that have ended by their time
        self.num_waited_for = 0  # leases on KV blocks that did, and looks at waiting for room for embeddings
        self.hangs: dict[SimulatedProcess, float] = {}  # how long the next step of an engine takes
        self._granted: dict[SimulatedProcess, dict[str, bool]] = {}  # leases that a process was given; late?
        self._made_at: dict[str, float] = {}  # of leases
        self._late: list[tuple[SimulatedProcess, SimulatedWorker, BlockMemory, frozenset[int]]] = []
        self._has_read_late: set[tuple[SimulatedWorker, str]] = set()
        self._num_incarnations = 0
        self._num_leases = 0
        for idx in range(shape.num_doors):
            self.start_door(f"door{idx}")
        for idx, role in enumerate(shape.roles):
            self.start_worker(f"{role[0].upper() if role is not Role.ENCODE_PREFILL else 'EP'}{idx}", role)

    @property
    def live_workers(self) -> list[SimulatedWorker]:
        everyone = [*self.workers.values(), *self.draining]
        return [worker for worker in everyone if not worker.process.is_dead]

    # What workers ask of their host

    def make_agent(self, name: str, thread: SimulatedThread) -> SimulatedAgent:
        return self.transfers.agent(name, thread)

    def made_at(self, lease_id: str) -> float:
        """When the lease was opened."""
        return self._made_at[lease_id]

    def was_given(self, lease_id: str) -> bool:
        """Whether a process has read the lease's grant."""
        return any(lease_id in granted for granted in self._granted.values())

    def has_ended(self, process: Any) -> bool:
        return self.shape.is_one_host and any(worker.process_id == process for worker in self.past_workers)

    def draft(self, choice: Any) -> Sequence[bool]:
        if not self.shape.drafts:
            return ()
        if self.sizes.runs_ahead:  # then guesses are what a grammar forces
            return [True] * self.rng.randrange(5) if self.rng.random() < self.shape.drafts else ()
        return [self.rng.random() < self.shape.drafts for _ in range(self.rng.randrange(3))]

    def is_late(self) -> bool:
        return self.sizes.runs_ahead and self.shape.drafts > 0 and self.rng.random() < 0.1

    def on_foreign(
        self, worker: SimulatedWorker, memory: BlockMemory, request_id: str, block_ids: Sequence[int]
    ) -> None:
        late = worker.late_blocks.get(memory, set())
        # What a request computes from late rows, of embeddings too, is wrong until the owner has been told.
        is_derived = (worker, request_id) in self._has_read_late and any(worker.late_blocks.values())
        if not (late.issuperset(block_ids) or is_derived):
            kind = "KV" if worker.language is not None and memory is worker.language.kv else "embeddings"
            raise AssertionError(f"{worker.name} reads foreign {kind} for {request_id}: blocks {block_ids}")
        self._has_read_late.add((worker, request_id))
        self.scheduler.note(worker.name, f"{request_id} reads what was written late: {block_ids}")
        story = self.clients.stories.get(request_id.partition(".")[0])
        if story is not None:
            story.is_tainted = True

    # Processes

    def start_worker(self, replica_id: str, role: Role) -> SimulatedWorker:
        self._num_incarnations += 1
        worker = SimulatedWorker(self, replica_id, role, self._num_incarnations, self._clock())
        self.workers[replica_id] = worker
        self.scheduler.note("serve", f"starts {worker.name}")
        self.list_workers(role)
        return worker

    def start_door(self, name: str) -> SimulatedDoor:
        self._num_incarnations += 1
        door = SimulatedDoor(
            self.scheduler,
            f"{name}@{self._num_incarnations}",
            self._clock(),
            ScatteredPolicy(self.rng, self.shape.scattered),
            self.shape.admission,
            self._dial,
            self.clients.on_deliver,
        )
        self.doors.append(door)
        for role in sorted({worker.role for worker in self.workers.values()}):
            self._tell(door, role)
        return door

    def list_workers(self, role: Role) -> None:
        """Serve pushes its list to every door."""
        for door in self.doors:
            self._tell(door, role)

    def _tell(self, door: SimulatedDoor, role: Role) -> None:
        door.later(0.001 + 0.01 * self.rng.random(), self._push, door, role)

    def _push(self, door: SimulatedDoor, role: Role) -> None:
        members = [
            worker.member(self.shape.overcommit) for worker in self.workers.values() if worker.role is role
        ]
        door.members.update(role, members)

    def kill(self, process: SimulatedProcess) -> None:
        """SIGKILL. Its kernel closes its sockets; Serve does not know yet."""
        if process.is_dead:
            return
        self.scheduler.note(process.name, "is killed")
        self.num_killed += 1
        self.ended_at[process] = self.scheduler.now
        self.transfers.die(process)
        self.network.died(process)
        self.scheduler.kill(process)
        for worker in list(self.workers.values()):
            if worker.process is process:
                self.past_workers.append(worker)
                for door in self.doors:
                    for attempt_id, replica_id in list(door.serve_calls.items()):
                        if replica_id == worker.replica_id:
                            delay_s = 0.02 * self.rng.random()
                            door.later(delay_s, door.dispatcher.fail_call, attempt_id)
        self.doors = [door for door in self.doors if door.process is not process]

    def replace(self, worker: SimulatedWorker, name: str) -> None:
        """Serve starts another replica, under its name or a new one."""
        if self.workers.get(worker.replica_id) is worker:
            del self.workers[worker.replica_id]
        self.start_worker(name, worker.role)

    def replace_later(self, worker: SimulatedWorker, seconds: float, *, is_same_name: bool) -> None:
        name = worker.replica_id if is_same_name else self._new_name(worker)
        self.scheduler.after(seconds, None, "", self.replace, worker, name)

    def drain(self, worker: SimulatedWorker) -> None:
        """Serve starts another replica and lists this one no more; it ends when no door is connected."""
        self.start_worker(self._new_name(worker), worker.role)
        self.draining.append(self.workers.pop(worker.replica_id))
        self.scheduler.note("serve", f"drains {worker.name}")
        self.list_workers(worker.role)

    def wake_all(self) -> None:
        """Every transfer thread looks at its clock once."""
        for worker in self.live_workers:
            for engine in worker.transfer_engines.values():
                engine.on_wake()

    def _new_name(self, worker: SimulatedWorker) -> str:
        return f"{worker.replica_id.partition('-')[0]}-{self._num_incarnations}"

    def stop_for(self, process: SimulatedProcess, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if process.is_dead or process.is_stopped:
            return
        self.scheduler.note(process.name, f"is stopped for {seconds:.1f} s")
        self.scheduler.stop(process)
        self.scheduler.after(seconds, None, f"{process.name} continues", self.scheduler.resume, process)

    # Networks

    def _dial(self, thread: SimulatedThread, replica_id: str, last_read: str | None, wanted: str) -> End:
        """Both greet each other at once; messages take their time."""
        worker = self.workers.get(replica_id)
        if worker is None or worker.process.is_dead or worker.process.is_stopped:
            raise UnavailableError(f"{replica_id} does not answer")
        if worker.name != wanted:
            raise UnavailableError(f"{worker.name} is at the address of {wanted}")
        if self.network.is_parted(thread.process, worker.process):
            raise UnavailableError(f"{replica_id} cannot be reached")
        near, far = self.network.connect(thread, worker.event_loop)
        near.peer_last_read, far.peer_last_read = worker.listener.last_read(thread.process.name), last_read
        far.on_message, far.on_close = partial(self._hear, worker), worker.listener.on_close
        near.arrives_at = far.arrives_at = self.scheduler.now + DIAL_S
        connection: Any = far
        worker.listener.on_connect(connection)
        return near

    def _hear(self, worker: SimulatedWorker, end: End, message: Any) -> None:
        if isinstance(message, DecodeTarget | EncodeTarget):
            lease_id = message.grant.lease_id
            on_its_way_s = self.scheduler.now - self._made_at[lease_id]
            is_late = on_its_way_s > 0.9 * self.sizes.margin_s
            self._granted.setdefault(worker.process, {})[lease_id] = is_late
        connection: Any = end
        worker.listener.on_message(connection, message)

    def check_landing(self, write: SimulatedWrite) -> None:
        """A write lands in blocks under a lease of this writer; or late because its process was stopped or
        parted from the owner's, or the grant was on its way for longer than the margin."""
        target = next(worker for worker in self.live_workers if worker.process is write.target.thread.process)
        granted = self._granted.get(write.source.thread.process, {})
        covered: set[int] = set()
        for lease_id, grant in target.transfer_engines[write.target.name].open_grants.items():
            if lease_id in granted:
                covered.update(grant.block_ids)
        was_held_up = write.was_parted or write.source.thread.process.num_stops > write.num_stops
        may_be_late = was_held_up or any(granted.values())
        for memory, block_ids in write.target.blocks_of(write).items():
            if covered.issuperset(block_ids):
                continue
            if not may_be_late:
                places = f"{target.name}, blocks {block_ids}"
                raise AssertionError(f"{write.source.name} writes to {places}, without a lease")
            self.num_late_writes += 1
            self.scheduler.note(target.name, f"was written late: blocks {block_ids}")
            target.late_blocks.setdefault(memory, set()).update(block_ids)
            self._late.append((write.source.thread.process, target, memory, frozenset(block_ids)))

    def check_late_words(self) -> None:
        """If no word was lost, the owner of blocks that were written late has been told of it."""
        for writer, target, memory, block_ids in self._late:
            untold = target.late_blocks[memory].intersection(block_ids)
            is_known = writer.is_dead or target.process.is_dead or not untold
            assert is_known, (
                f"{target.name} was not told that {writer.name} wrote late: blocks {sorted(untold)}"
            )

    def _clock(self) -> SkewedClock:
        if not self.shape.skew:
            return SkewedClock(self.scheduler)
        return SkewedClock(self.scheduler, self.rng.choice([0.0, 7.0, 1e6]), self.rng.uniform(0.98, 1.02))

    def lease_ids(self) -> Any:
        """Names of leases are random in the product, and here a count."""

        def token_hex(num_bytes: int) -> str:
            self._num_leases += 1
            name = f"{self._num_leases:04}"
            self._made_at[f"lease-{name}"] = self.scheduler.now
            return name

        return patch.object(cluster.ids, "secrets", SimpleNamespace(token_hex=token_hex))
