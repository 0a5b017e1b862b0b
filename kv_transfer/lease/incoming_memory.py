"""The memory that leases open to writers, with its wire memory: what a grant says of them, and whether the
bytes are right."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import CodedPart, Grant
from kv_transfer.agents.agent import Agent
from kv_transfer.codecs.checksum import has_checksum
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.envelope import Envelope, contract_of


class IncomingMemory:
    """Registered with the agent when it is made. `coded_part` and `free_wire` are any thread's, `take_in` the
    agent's."""

    def __init__(self, agent: Agent, memory: BlockMemory, model: str, wire: Wire | None):
        self.memory = memory
        self.wire = wire
        self.contract = contract_of(memory, model, "raw" if wire is None else wire.codec.name)
        agent.register(memory)
        if wire is not None:
            agent.register(wire.memory)

    def coded_part(self, run_lengths: Sequence[int], skipped: Sequence[int]) -> CodedPart | None:
        """Allocates wire blocks. None: no group is to travel coded, or there is no room. `run_lengths`: none
        if all travels raw."""
        if self.wire is None or not run_lengths:
            return None
        first_blocks = self.wire.first_blocks(run_lengths, skipped)
        if not first_blocks:
            return None
        wire_ids = self.wire.try_allocate(len(first_blocks))
        if wire_ids is None:
            return None
        return CodedPart(
            base_address=self.wire.memory.base_address,
            num_blocks=self.wire.memory.num_blocks,
            block_ids=tuple(wire_ids),
            generations=self.wire.generations(wire_ids),
            first_blocks=tuple(first_blocks),
        )

    def free_wire(self, grant: Grant) -> None:
        if grant.coded is not None and self.wire is not None:
            self.wire.free(grant.coded.block_ids)

    def take_in(self, grant: Grant, envelope: Envelope) -> bool:
        """Checks all bytes and decodes the coded groups. False: the bytes are not those that were sent. Takes
        as long as reading."""
        if not _fit(envelope.written, len(grant.block_ids)):
            return False
        if not has_checksum(self.memory, [grant.block_ids[i] for i in envelope.written], envelope.checksum):
            return False
        if not envelope.coded:
            return True
        wire, part = self.wire, grant.coded
        if wire is None or part is None or not _fit(envelope.coded, len(part.block_ids)):
            return False
        wire_ids = [part.block_ids[i] for i in envelope.coded]
        if not has_checksum(wire.memory, wire_ids, envelope.coded_checksum):
            return False
        firsts = (part.first_blocks[i] for i in envelope.coded)
        wire.decode(wire_ids, [grant.block_ids[first : first + wire.blocks_per_group] for first in firsts])
        return True


def _fit(places: Sequence[int], count: int) -> bool:
    return all(0 <= place < count for place in places)
