"""How the contract suite makes agents of each kind, and the peers that live in processes of their own."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from cluster.clock import SystemClock
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from kv_transfer.agents.agent import Agent, TransferError, TransferState
from kv_transfer.agents.collective_agent import CollectiveAgent
from kv_transfer.agents.factory import Transport
from kv_transfer.agents.factory import make_agent as make_cluster_agent
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.agents.nixl_agent import NixlAgent, NixlWrite, load_nixl
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.clock import ManualClock
from tests.fakes.sockets import listeners_of

LAYOUT = MemoryLayout((SegmentSpec(16, (4, 16), torch.float32),) * 2)
NUM_BLOCKS = 32
BIG_LAYOUT = MemoryLayout((SegmentSpec(16, (256,), torch.float32),) * 2)  # blocks of 32 KiB
NUM_BIG_BLOCKS = 1024  # 32 MiB
HANG_S = 300.0  # a guard only: a process takes seconds to start, and much longer on a busy machine
LEASE_S = 2 * HANG_S  # so that no failure is found only because a lease has ended
_serial = itertools.count()


def unique_name(stem: str) -> str:
    return f"{stem}-{os.getpid()}-{next(_serial)}"


def nixl_missing() -> str | None:
    """Why NIXL cannot be tested here, or None."""
    try:
        load_nixl()
    except ConfigError as error:
        return error.message
    return None


MISSING = nixl_missing()
needs_nixl = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
BETWEEN_PROCESSES = ["collective", pytest.param("nixl", marks=needs_nixl)]
ALL_KINDS = ["in_process", *BETWEEN_PROCESSES]


def make_agent(kind: str, name: str, network: InProcessNetwork | None = None) -> Agent:
    if kind == "in_process":
        assert network is not None
        return network.agent(name)
    return CollectiveAgent(name, "127.0.0.1") if kind == "collective" else NixlAgent(name)


def serve_leases(pipe: Connection, kind: str, name: str) -> None:
    """A process that owns a large memory: grants on request, answers with the lease's event and the bytes of
    the blocks."""
    events: list[object] = []
    memory = BlockMemory(BIG_LAYOUT, NUM_BIG_BLOCKS)
    transfer_engine = TransferEngine(
        make_agent(kind, name), SystemClock(), events.append, incoming=memory, margin_s=1.0
    )
    transfer_engine.start()
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        lease_id, block_ids = request
        pipe.send(transfer_engine.grant(lease_id, block_ids, [0] * len(block_ids), LEASE_S))
        while not events:
            time.sleep(0.0005)
        blocks = [segment[block_ids].clone() for segment in memory.segments]
        pipe.send((type(events[0]).__name__, getattr(events[0], "payload", b""), blocks))
        events.clear()
    transfer_engine.close(1.0)


def write_without_cma(pipe: Connection) -> None:
    """A process in which UCX may use TCP only: writes between two of its agents and sends the result."""
    os.environ["UCX_TLS"] = "tcp"
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("kv_transfer").addHandler(handler)
    writer, owner = NixlAgent(unique_name("writer")), NixlAgent(unique_name("owner"))
    source, target = BlockMemory(LAYOUT, NUM_BLOCKS), BlockMemory(LAYOUT, NUM_BLOCKS)
    source.buffer.fill_(7)
    writer.register(source)
    owner.register(target)
    peer = writer.connect(owner.metadata())
    deadline = time.monotonic() + HANG_S
    states: list[TransferState] = []
    for block in range(NUM_BLOCKS):
        handle = writer.post(peer, source.descriptors([block]), target.descriptors([block]))
        while writer.poll(handle) is TransferState.PENDING and time.monotonic() < deadline:
            owner.notifications()
            writer.notifications()
        states.append(writer.poll(handle))
        writer.release(handle)
    pipe.send((states, bool((target.buffer == 7).all()), messages))
    writer.close()
    owner.close()


class PostingAgent(NixlAgent):
    def __init__(self, name: str):
        super().__init__(name)
        self.posted: list[NixlWrite] = []

    def post(self, peer: str, local: Any, remote: Any, notification: bytes = b"") -> NixlWrite:
        self.posted.append(super().post(peer, local, remote, notification))
        return self.posted[-1]


class DeafAgent(NixlAgent):
    """While `is_deaf`, what has come is not read."""

    is_deaf = False

    def notifications(self) -> list[tuple[str, bytes]]:
        return [] if self.is_deaf else super().notifications()


def write_late_without_cma(pipe: Connection) -> None:
    """A process in which UCX may use TCP only. A write of 16 MiB is posted; its owner stands still until its
    lease is over and its blocks are others'. Sends what was seen."""
    os.environ["UCX_TLS"] = "tcp"
    source, target = (BlockMemory(BIG_LAYOUT, NUM_BIG_BLOCKS) for _ in range(2))
    sent: list[object] = []
    received: list[object] = []
    clock, blocks = ManualClock(), list(range(NUM_BIG_BLOCKS // 2))

    def on_sent(event: Any) -> None:
        sent.append(event)
        if event.lease_id == "late":
            source.buffer.fill_(9)  # its blocks are others' from now on

    agent = PostingAgent(unique_name("writer"))
    writer = TransferEngine(agent, clock, on_sent, outgoing=source)
    owners_agent = DeafAgent(unique_name("owner"))
    owner = TransferEngine(owners_agent, clock, received.append, incoming=target, margin_s=1.0)

    def drive(until: Callable[[], object], at_most_s: float = HANG_S) -> None:
        deadline = time.monotonic() + at_most_s
        while not until() and time.monotonic() < deadline:
            writer.step()
            owner.step()

    def open_lease(lease_id: str, block_ids: list[int]) -> Outgoing:
        grant = owner.grant(lease_id, block_ids, [0] * len(block_ids), 1.0)
        outgoing = writer.open(grant.received(clock.at))
        outgoing.write(block_ids, range(len(block_ids)))
        return outgoing

    source.buffer.fill_(7)
    open_lease("connects", [NUM_BIG_BLOCKS - 1]).finish(b"")
    drive(lambda: sent and received)
    open_lease("late", blocks)
    for _ in range(200):
        writer.step()
    clock.at = 1.0
    for _ in range(200):
        writer.step()
    try:
        agent.release(agent.posted[-1])
        refusal = ""
    except TransferError as error:
        refusal = error.message
    num_sent = len(sent)
    clock.at = 2.0
    owners_agent.is_deaf = True
    owner.step()  # time passes for the lease
    owners_agent.is_deaf = False
    owner.step()
    target.buffer.fill_(5)
    drive(lambda: len(sent) > 1 and len(received) > 2)
    drive(lambda: False, 0.2)
    bytes_there = {
        int(byte) for segment in target.segments for byte in segment[blocks].view(torch.uint8).unique()
    }
    pipe.send((refusal, num_sent, sent[1:], received[1:], bytes_there))
    writer.close()
    owner.close()


def listen(pipe: Connection, kind: Transport, net_devices: tuple[str, ...] | None) -> None:
    """A process with an agent that peers may write to: sends its listening addresses, and whether each is
    loopback."""
    devices: dict[str, Any] = {} if net_devices is None else {"net_devices": net_devices}
    agent = make_cluster_agent(kind, unique_name("owner"), **devices)
    agent.register(BlockMemory(LAYOUT, NUM_BLOCKS))
    pipe.send([(listener.is_local, str(listener)) for listener in listeners_of([os.getpid()])])
    agent.close()


def fail_to_listen(pipe: Connection) -> None:
    """A process whose agent is told to use a network device that does not exist."""
    try:
        make_cluster_agent("nixl", unique_name("owner"), net_devices=("nosuch0",))
    except ConfigError as error:
        pipe.send((error.param, error.message))
