"""A writer and an owner of leases over the in-process agent, stepped by hand on a virtual clock."""

from __future__ import annotations

from typing import Any

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.types.members import ProcessId
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import LateWrite
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.clock import ManualClock

TTL_S, MARGIN_S = 10.0, 2.0


class SteppedPair:
    """Somebody who writes and somebody who owns, moved by hand; a base for pairs that have `writer`, `owner`
    and `clock`."""

    writer: Any
    owner: Any
    clock: ManualClock

    def step(self, rounds=1):
        for _ in range(rounds):
            self.writer.step()
            self.owner.step()

    def let_everything_end(self):
        self.step(20)
        for _ in range(3):
            self.clock.at += TTL_S
            self.step(2)


class LeasePair(SteppedPair):
    """The owner frees a lease's blocks with its event, as engines do."""

    def __init__(
        self,
        source: BlockMemory,
        target: BlockMemory,
        writer_wire: Wire | None = None,
        owner_wire: Wire | None = None,
    ):
        self.clock = ManualClock()
        self.network = InProcessNetwork()
        self.source, self.target = source, target
        self.writer_wire, self.owner_wire = writer_wire, owner_wire
        self.pool = BlockPool(target.num_blocks, block_size(target.layout))
        self.held: dict[str, list[int]] = {}
        self.ended: set[ProcessId] = set()  # of processes that may have been given a grant
        self.sent, self.received = [], []
        self.writer = TransferEngine(
            self.network.agent("writer"),
            self.clock,
            self.on_sent,
            outgoing=source,
            outgoing_wire=writer_wire,
        )
        self.owner = TransferEngine(
            self.network.agent("owner"),
            self.clock,
            self.on_received,
            incoming=target,
            incoming_wire=owner_wire,
            margin_s=MARGIN_S,
            has_ended=lambda process: process in self.ended,
        )

    def on_sent(self, event):
        self.sent.append(event)

    def on_received(self, event):
        self.received.append(event)
        if isinstance(event, LateWrite):
            return
        self.pool.free(self.held.pop(event.lease_id))

    def take(self, lease_id, num_blocks):
        self.held[lease_id] = blocks = self.pool.allocate(num_blocks)
        return blocks, self.pool.generations(blocks)

    def open(self, grant):
        """The writer takes up a grant that it is handed now."""
        return self.writer.open(grant.received(self.clock.at))

    def audit(self):
        assert self.writer.num_open == 0 and self.owner.num_open == 0
        assert not self.held and self.pool.num_referenced == 0
        self.pool.check_integrity()
        for wire in (self.writer_wire, self.owner_wire):
            assert wire is None or wire.num_used == 0
        assert not self.writer.agent.handles
        for events in (self.sent, self.received):
            names = [event.lease_id for event in events if not isinstance(event, LateWrite)]
            assert len(names) == len(set(names)), "a lease had two ends"


def block_size(layout: MemoryLayout) -> int:
    return layout.segments[0].rows
