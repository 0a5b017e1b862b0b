"""The memories that leases read and write: a block memory and, next to it, its wire memory. What a grant says
of those that are open to writers, and whether the bytes are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import CodedPart, Grant
from kv_transfer.agents.agent import Agent
from kv_transfer.codecs.checksum import BlockSums
from kv_transfer.codecs.pending import Pending, done
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.envelope import Envelope, contract_of


class TransferMemory:
    """Registered with the agent when it is made. Agent's thread."""

    def __init__(self, agent: Agent, memory: BlockMemory, model: str, wire: Wire | None):
        self.memory = memory
        self.wire = wire
        self.contract = contract_of(memory, model, "raw" if wire is None else wire.codec.name)
        self.sums = BlockSums(memory)
        self.wire_sums = None if wire is None else BlockSums(wire.memory)
        agent.register(memory)
        if wire is not None:
            agent.register(wire.memory)

    def begin(self) -> None:
        """Begins what was asked for since the last call, on a GPU."""
        for gathered in (self.wire, self.sums, self.wire_sums):
            if gathered is not None:
                gathered.begin()


class IncomingMemory(TransferMemory):
    """`coded_part` and `free_wire` are any thread's."""

    def coded_part(
        self, run_lengths: Sequence[int], skipped: Sequence[int], num_places: int
    ) -> CodedPart | None:
        """Allocates wire blocks. None: no group is to travel coded, or there is no room. `run_lengths`: none
        if all travels raw. `num_places`: blocks that travel; those that are of no run belong to the runs'
        states, and each has as many."""
        if self.wire is None or not run_lengths:
            return None
        num_kv = sum(map(self.wire.num_blocks, run_lengths)) - sum(skipped)
        num_behind = (num_places - num_kv) // len(run_lengths)
        first_blocks = self.wire.first_blocks(run_lengths, skipped, num_behind)
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

    def take_in(self, grant: Grant, envelope: Envelope) -> Iterator[bool | None]:
        """Checks all bytes and decodes the coded groups, in as many rounds as are asked for. None: ask again,
        the device still reads or writes. False: the bytes are not those that were sent."""
        checks = list(self._checks(grant, envelope))
        while not all(check.is_done() for check in checks):
            yield None
        if not all(check.value() for check in checks):
            yield False
            return
        decoding = self._decode(grant, envelope)
        while not decoding.is_done():
            yield None
        decoding.value()
        yield True

    def _checks(self, grant: Grant, envelope: Envelope) -> Iterator[Pending[bool]]:
        part, wire_sums = grant.coded, self.wire_sums
        wire_ids = () if part is None or wire_sums is None else part.block_ids
        if not (_fit(envelope.written, len(grant.block_ids)) and _fit(envelope.coded, len(wire_ids))):
            yield done(False)
            return
        yield self.sums.match([grant.block_ids[i] for i in envelope.written], envelope.checksum)
        if envelope.coded and wire_sums is not None:
            yield wire_sums.match([wire_ids[i] for i in envelope.coded], envelope.coded_checksum)

    def _decode(self, grant: Grant, envelope: Envelope) -> Pending[None]:
        """Decodes the coded groups of a notification that fits the grant."""
        wire, part = self.wire, grant.coded
        if not envelope.coded or wire is None or part is None:
            return done(None)
        firsts = (part.first_blocks[i] for i in envelope.coded)
        groups = [grant.block_ids[first : first + wire.blocks_per_group] for first in firsts]
        return wire.decode([part.block_ids[i] for i in envelope.coded], groups)


def _fit(places: Sequence[int], count: int) -> bool:
    return all(0 <= place < count for place in places)
