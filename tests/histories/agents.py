"""Transfer agents of simulated processes: one-sided writes and notifications whose delivery the scheduler
drives.

    post      the bytes land inside the call, or later, in order with what else is between the two agents
    notify    arrives behind the writes that were posted before
    release   only of a write that is over: none can be called off, whatever its lease's time is
    failure   of a write, or of the connection to its peer: what was posted lands soon all the same, or never
    death     of the writer: what it had posted lands at once, or never. Of the owner: posts raise
    partition writes and notifications wait until it heals; meanwhile polls may lose the peer
    stop      of the writer: its writes land when it continues (its own threads copy). Only so, by a stop
              inside `post` and by a partition can a write land late

Every landing is checked (`LandingCheck`): the block must be under an open lease that this writer was granted,
or the write must be late because its process was stopped or parted. The blocks of late writes are remembered
until the owner's engine has been told (`late_blocks`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np

from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState
from kv_transfer.agents.regions import RegionTable, check_sizes, locate
from tests.histories.scheduler import Scheduler, SimulatedProcess, SimulatedThread


@dataclass(eq=False)
class SimulatedWrite:
    """The handle of a post."""

    source: SimulatedAgent
    target: SimulatedAgent
    local: np.ndarray
    remote: np.ndarray
    num_stops: int  # of the writer's process, when its time was checked
    state: TransferState = TransferState.PENDING
    was_parted: bool = False  # from its target, since it was posted
    is_adrift: bool = False  # it has failed, and may land soon


@dataclass
class TransferFaults:
    """Armed by the fault plan; each happens once, to the next operation of its kind."""

    failing: dict[str, type[TransferError]] = field(default_factory=dict)  # by verb
    notifications: list[str] = field(default_factory=list)  # "lost", "doubled"
    stalls: dict[SimulatedProcess, float] = field(default_factory=dict)  # inside the next post; seconds
    num_failed_connects: int = 0


class TransferNetwork:
    def __init__(self, scheduler: Scheduler, rng: Random, is_parted: Callable[..., bool]):
        self.scheduler, self.rng, self.is_parted = scheduler, rng, is_parted
        self.faults = TransferFaults()
        self.delay_s: Callable[[], float] = lambda: 0.0005 + 0.003 * rng.random()
        self.check_landing: Callable[[SimulatedWrite], None] = lambda write: None
        self.stop: Callable[[SimulatedProcess, float], None] = lambda process, seconds: None
        self._agents: dict[str, SimulatedAgent] = {}
        self._arrives_at: dict[tuple[str, str], float] = {}

    def agent(self, name: str, thread: SimulatedThread) -> SimulatedAgent:
        """`name`: unique per incarnation of a process."""
        self._agents[name] = agent = SimulatedAgent(self, name, thread)
        return agent

    def find(self, name: str) -> SimulatedAgent | None:
        return self._agents.get(name)

    def die(self, process: SimulatedProcess) -> None:
        """Before the process is killed: its writes are on their way."""
        for agent in list(self._agents.values()):
            if agent.thread.process is process:
                for write in agent.pending if self.rng.random() < 0.5 else ():
                    self._land(write)
                agent.is_closed = True
                del self._agents[agent.name]

    def arrival(self, source: SimulatedAgent, target: SimulatedAgent) -> float:
        """Of what is sent now."""
        pair = source.name, target.name
        at = max(self._arrives_at.get(pair, 0.0), self.scheduler.now + self.delay_s())
        self._arrives_at[pair] = at
        return at

    def post(self, write: SimulatedWrite, *, at_once: bool) -> None:
        if at_once and not self.is_parted(write.source.thread.process, write.target.thread.process):
            return self._land(write)
        at = self.arrival(write.source, write.target)
        self.scheduler.at(at, write.source.nic, "", self._land_if_connected, write)

    def fail(self, write: SimulatedWrite) -> None:
        if write.state is TransferState.PENDING:
            write.state, write.is_adrift = TransferState.FAILED, self.rng.random() < 0.5

    def notify(self, source: SimulatedAgent, target: SimulatedAgent, payload: bytes) -> None:
        fate = self.faults.notifications.pop() if self.faults.notifications else ""
        for _ in range({"lost": 0, "doubled": 2}.get(fate, 1)):
            at = self.arrival(source, target)
            self.scheduler.at(at, target.nic, "", self._arrive, source, target, payload)

    def _land_if_connected(self, write: SimulatedWrite) -> None:
        if self.is_parted(write.source.thread.process, write.target.thread.process):
            write.was_parted, write.is_adrift = True, False
            self.scheduler.after(0.05, write.source.nic, "", self._land_if_connected, write)
        elif write.is_adrift and write.source.thread.process.num_stops == write.num_stops:
            self._land(write)
        elif write.state is TransferState.PENDING:
            self.scheduler.step(write.source.thread.process)
            self._land(write)

    def _land(self, write: SimulatedWrite) -> None:
        is_over = write.state is not TransferState.PENDING and not write.is_adrift
        if is_over or write.target.is_closed:
            return
        self.check_landing(write)
        self.scheduler.note(
            str(write.source.thread), f"=> {write.target.name} {list(write.target.blocks_of(write).values())}"
        )
        _move(write.local, write.remote)
        if write.state is TransferState.PENDING:
            write.state = TransferState.DONE
            write.source.wake()

    def _arrive(self, source: SimulatedAgent, target: SimulatedAgent, payload: bytes) -> None:
        if self.is_parted(source.thread.process, target.thread.process):
            self.scheduler.after(0.05, target.nic, "", self._arrive, source, target, payload)
        elif not target.is_closed:
            self.scheduler.step(target.thread.process)
            target.inbox.append((source.name, payload))
            target.wake()


class SimulatedAgent:
    def __init__(self, network: TransferNetwork, name: str, thread: SimulatedThread):
        self.name, self.thread = name, thread
        self.nic = SimulatedThread(thread.process, f"{thread.name} nic")
        self.wake: Callable[[], None] = lambda: None  # something has landed or arrived
        self.inbox: list[tuple[str, bytes]] = []
        self.pending: list[SimulatedWrite] = []  # posted and not released
        self.is_closed = False
        self._network = network
        self.table = RegionTable()
        self._memories: list[BlockMemory] = []
        self._peers: dict[str, SimulatedAgent | None] = {}

    def register(self, memory: BlockMemory) -> None:
        self.table.register(memory)
        self._memories.append(memory)

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(self.name)

    def connect(self, metadata: bytes) -> str:
        self._begin("connect")
        name: str = msgspec.msgpack.decode(metadata)
        self._peers[name] = self._network.find(name)
        return name

    def post(
        self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b""
    ) -> SimulatedWrite:
        num_stops = self.thread.process.num_stops
        stall_s = self._network.faults.stalls.pop(self.thread.process, 0.0)
        if stall_s:  # the process stands still between its look at the clock and its write
            self._network.stop(self.thread.process, stall_s)
            self._network.scheduler.pass_time(self.thread, 0.0)
        self._begin("post")
        check_sizes(local, remote)
        target = self._reach(peer)
        locate(remote, target.table.regions)
        write = SimulatedWrite(self, target, local.copy(), remote.copy(), num_stops)
        self.pending.append(write)
        self._network.post(write, at_once=bool(stall_s) or self._network.rng.random() < 0.3)
        return write

    def poll(self, handle: SimulatedWrite) -> TransferState:
        error = self._network.faults.failing.pop("poll", None)
        if handle.state is TransferState.PENDING:
            if error is not None and not handle.target.is_closed:
                self._network.check_landing(handle)
                half = handle.local.copy()
                half[:, 1] //= 2
                _move(half, handle.remote)
                self._network.fail(handle)
            if handle.target.is_closed or error is PeerLostError:
                self._network.fail(handle)
                raise PeerLostError(f"peer {handle.target.name} is gone")
        return handle.state

    def ended_at(self, handle: SimulatedWrite) -> None:
        return None

    def notify(self, peer: str, payload: bytes) -> None:
        self._begin("notify")
        self._network.notify(self, self._reach(peer), payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._begin("notifications")
        ready, self.inbox = self.inbox, []
        return ready

    def release(self, handle: SimulatedWrite) -> None:
        if handle.state is TransferState.PENDING:
            raise TransferError("a write in flight cannot be called off")
        self.pending.remove(handle)

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        for write in self.pending:
            if write.target.name == peer:
                self._network.fail(write)

    def close(self) -> None:
        self.is_closed = True

    def blocks_of(self, write: SimulatedWrite) -> dict[BlockMemory, list[int]]:
        """The blocks of this agent's memories that the write touches."""
        found: dict[BlockMemory, set[int]] = {}
        for address, num_bytes in write.remote.tolist():
            for memory in self._memories:
                offset = address - memory.base_address
                if 0 <= offset < memory.buffer.numel():
                    found.setdefault(memory, set()).update(_blocks_at(memory, offset, offset + num_bytes))
        return {memory: sorted(blocks) for memory, blocks in found.items()}

    def _begin(self, verb: str) -> None:
        if self.is_closed:
            raise TransferError(f"agent {self.name} is closed")
        if (error := self._network.faults.failing.pop(verb, None)) is not None:
            self._network.faults.num_failed_connects += verb == "connect"
            raise error(f"scripted: {verb} fails")

    def _reach(self, peer: str) -> SimulatedAgent:
        agent = self._peers.get(peer)
        if agent is None or agent.is_closed:
            raise PeerLostError(f"peer {peer} is gone")
        return agent


def _blocks_at(memory: BlockMemory, start: int, end: int) -> set[int]:
    """The blocks in these bytes of the memory, which may run over several segments."""
    found: set[int] = set()
    for segment in memory.layout.segments:
        size, num_bytes = segment.block_bytes, segment.block_bytes * memory.num_blocks
        found.update(range(max(0, start) // size, -(-min(end, num_bytes) // size)))
        start, end = start - num_bytes, end - num_bytes
    return found


def _move(local: np.ndarray, remote: np.ndarray) -> None:
    for (source, num_bytes), (target, _) in zip(local.tolist(), remote.tolist(), strict=True):
        ctypes.memmove(target, source, num_bytes)
