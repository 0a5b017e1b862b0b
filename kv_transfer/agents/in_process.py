"""Agents of one process, joined by an `InProcessNetwork`, with a script of faults.

Bytes really move: a post is a memmove between registered addresses, checked against the registered ranges.
Tests and the single-process cluster run the same state machines over it as over NIXL.

Faults are scripted before they happen and are counted over the whole network, from 1:

    network.faults.fail_at(7)                  the 7th operation of any verb fails
    network.faults.fail("post", 2)             the 2nd post fails
    network.faults.drop(1); .duplicate(2); .delay(3, polls=5)    by number of the notification
    network.faults.post_polls = 3              every post stays PENDING for 3 polls and copies only then
    network.faults.is_parted = True            no write in flight moves a byte until it is False again
    network.kill("decode-0")                   the process of that agent is gone

A failing `poll` answers FAILED with half of the bytes written; every other verb raises. Operations are the
verbs connect, post, poll, notify and notifications. An agent belongs to one thread; agents of different
threads may be joined.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState, before_posting
from kv_transfer.agents.regions import Region, RegionTable, check_sizes, locate


class InProcessMetadata(msgspec.Struct, frozen=True):
    name: str
    regions: tuple[Region, ...]


@dataclass
class FaultScript:
    post_polls: int = 0  # polls that a post stays PENDING
    is_parted: bool = False
    num_operations: int = 0  # seen so far
    num_notifications: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _any: dict[int, TransferError] = field(default_factory=dict)
    _by_verb: dict[tuple[str, int], TransferError] = field(default_factory=dict)
    _dropped: set[int] = field(default_factory=set)
    _duplicated: set[int] = field(default_factory=set)
    _delayed: dict[int, int] = field(default_factory=dict)

    def fail_at(self, nth: int, error: TransferError | None = None) -> None:
        self._any[nth] = error or TransferError(f"scripted: operation {nth} fails")

    def fail(self, verb: str, nth: int, error: TransferError | None = None) -> None:
        self._by_verb[verb, nth] = error or TransferError(f"scripted: {verb} {nth} fails")

    def drop(self, nth: int) -> None:
        self._dropped.add(nth)

    def duplicate(self, nth: int) -> None:
        self._duplicated.add(nth)

    def delay(self, nth: int, polls: int) -> None:
        """The notification comes out of the target's `polls`-th later call of `notifications`."""
        self._delayed[nth] = polls

    def next_operation(self, verb: str) -> TransferError | None:
        self.num_operations += 1
        self.counts[verb] += 1
        return self._any.get(self.num_operations) or self._by_verb.get((verb, self.counts[verb]))

    def next_notification(self) -> list[int]:
        """The delay, in polls, of each copy to deliver; empty: the notification is lost."""
        self.num_notifications += 1
        nth = self.num_notifications
        if nth in self._dropped:
            return []
        return [self._delayed.get(nth, 0)] * (2 if nth in self._duplicated else 1)


class InProcessNetwork:
    def __init__(self) -> None:
        self.faults = FaultScript()
        self._agents: dict[str, InProcessAgent] = {}

    def agent(self, name: str) -> InProcessAgent:
        """A new agent. It replaces an agent of the same name, as a restarted process does."""
        self.kill(name)
        self._agents[name] = agent = InProcessAgent(name, self)
        return agent

    def kill(self, name: str) -> None:
        """The process of that agent dies: from now on its own calls raise, and so do the calls of others to
        it."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            agent.is_closed = True

    def find(self, name: str) -> InProcessAgent | None:
        return self._agents.get(name)


@dataclass
class InProcessWrite:
    """The handle of a post."""

    peer: InProcessAgent
    local: np.ndarray
    remote: np.ndarray
    notification: bytes
    num_polls_left: int
    state: TransferState = TransferState.PENDING


class InProcessAgent:
    def __init__(self, name: str, network: InProcessNetwork):
        self.name = name
        self.is_closed = False
        self.handles: dict[int, InProcessWrite] = {}  # posted and not released
        self._network = network
        self._table = RegionTable()
        self._peers: dict[str, tuple[bytes, InProcessAgent | None]] = {}
        self._inbox: deque[tuple[int, str, bytes]] = deque()  # (polls left, sender, payload)

    def register(self, memory: BlockMemory) -> None:
        if memory.buffer.device.type != "cpu":
            raise ValueError("the in-process agent copies CPU memory only")
        self._table.register(memory)

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(InProcessMetadata(self.name, self._table.regions))

    def connect(self, metadata: bytes) -> str:
        self._begin("connect")
        try:
            name = msgspec.msgpack.decode(metadata, type=InProcessMetadata).name
        except msgspec.MsgspecError as error:
            raise TransferError(f"agent metadata cannot be read: {error}") from error
        known = self._peers.get(name)
        if known is None or known[0] != metadata or known[1] is None or known[1].is_closed:
            self._peers[name] = (metadata, self._network.find(name))
        return name

    def post(
        self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b""
    ) -> InProcessWrite:
        self._begin("post")
        with before_posting():
            check_sizes(local, remote)
            target = self._reach(peer)
            locate(local, self._table.regions)
            locate(remote, target._table.regions)
        write = InProcessWrite(
            target, local.copy(), remote.copy(), notification, self._network.faults.post_polls
        )
        self.handles[id(write)] = write
        if write.num_polls_left == 0 and not self._network.faults.is_parted:
            self._complete(write)
        return write

    def poll(self, handle: InProcessWrite) -> TransferState:
        error = self._next_error("poll")
        if handle.state is TransferState.PENDING:
            if handle.peer.is_closed:
                handle.state = TransferState.FAILED
                raise PeerLostError(f"peer {handle.peer.name} is gone")
            if error is not None:
                handle.local[:, 1] //= 2
                _move(handle.local, handle.remote)
                handle.state = TransferState.FAILED
            elif not self._network.faults.is_parted:
                handle.num_polls_left -= 1
                if handle.num_polls_left <= 0:
                    self._complete(handle)
        elif error is not None:
            handle.state = TransferState.FAILED
        if isinstance(error, PeerLostError):
            raise error
        return handle.state

    def ended_at(self, handle: InProcessWrite) -> None:
        return None

    def notify(self, peer: str, payload: bytes) -> None:
        self._begin("notify")
        self._send(self._reach(peer), payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._begin("notifications")
        ready: list[tuple[str, bytes]] = []
        for _ in range(len(self._inbox)):
            polls_left, sender, payload = self._inbox.popleft()
            if polls_left > 0:
                self._inbox.append((polls_left - 1, sender, payload))
            else:
                ready.append((sender, payload))
        return ready

    def release(self, handle: InProcessWrite) -> None:
        if handle.state is TransferState.PENDING and not self.is_closed:
            raise TransferError(f"a write to {handle.peer.name} is in flight and cannot be cancelled")
        self.handles.pop(id(handle), None)

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        for write in self.handles.values():
            if write.peer.name == peer and write.state is TransferState.PENDING:
                write.state = TransferState.FAILED

    def close(self) -> None:
        self.is_closed = True
        if self._network.find(self.name) is self:
            self._network.kill(self.name)
        self._peers.clear()

    def _next_error(self, verb: str) -> TransferError | None:
        if self.is_closed:
            raise TransferError(f"agent {self.name} is closed")
        return self._network.faults.next_operation(verb)

    def _begin(self, verb: str) -> None:
        error = self._next_error(verb)
        if error is not None:
            raise error

    def _reach(self, peer: str) -> InProcessAgent:
        _, agent = self._peers.get(peer, (b"", None))
        if agent is None or agent.is_closed:
            raise PeerLostError(f"peer {peer} is gone")
        return agent

    def _complete(self, write: InProcessWrite) -> None:
        _move(write.local, write.remote)
        write.state = TransferState.DONE
        if write.notification:
            self._send(write.peer, write.notification)

    def _send(self, target: InProcessAgent, payload: bytes) -> None:
        for polls in self._network.faults.next_notification():
            target._inbox.append((polls, self.name, payload))


def _move(local: np.ndarray, remote: np.ndarray) -> None:
    for (source, num_bytes), (target, _) in zip(local.tolist(), remote.tolist(), strict=False):
        ctypes.memmove(target, source, num_bytes)
