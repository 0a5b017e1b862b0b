"""The writer's half of leases: takes up grants, writes blocks into the owners' memories, notifies the owners.

In call order:

    outgoing = sender.open(received)                     a grant, whose time is counted from its receipt
    outgoing.write(local_block_ids, grant_indices)       any number of times, while the rest is computed
    outgoing.finish(payload)  or  outgoing.abort(reason) once; abort may also follow finish, and may repeat
    sender.poll()                                        again and again while `num_open` > 0

Every `open` that returned ends in exactly one event, also without finish or abort: the grant's time runs out.
The event waits for the writes that are in flight, which no transport can call off. Until that event the local
blocks belong to the transport and must not be freed. A lease is written once: its
grant is refused if it comes again. `lease_writer` holds the states of one lease.

Whole groups of blocks travel coded if the grant and this side have room for them
(`kv_transfer.codecs.wire_memory`). This is decided once for each lease and once for each group, because a
group goes layer by layer.

`open` and the methods of `Outgoing` only queue what is asked for and may be called from any thread. `poll`
acts on it and belongs to the agent's thread; a write may copy inside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from cluster.clock import Clock
from cluster.kvcache.memory import BlockMemory
from cluster.lost_device import raise_if_device_lost
from cluster.types.curves import Link
from cluster.types.transfer import ReceivedGrant, SentTotals
from kv_transfer.agents.agent import Agent, LayoutMismatchError, TransferError
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import SendEvent, SendFailed
from kv_transfer.lease.group_coding import GroupCoding
from kv_transfer.lease.lease_writer import LeaseWriter, SenderSide, SentBytes
from kv_transfer.lease.link_meter import PeerLinks
from kv_transfer.lease.memories import TransferMemory
from kv_transfer.lease.outgoing import Outgoing, WriterSide

logger = logging.getLogger(__name__)


class Sender:
    def __init__(
        self,
        agent: Agent,
        memory: BlockMemory,
        clock: Clock,
        wake: Callable[[], None] = lambda: None,
        model: str = "",
        wire: Wire | None = None,
    ):
        """`wake` is called from the caller's thread when `poll` has something new to do. `model`, `wire`: see
        `TransferEngine`."""
        self._memory = TransferMemory(agent, memory, model, wire)
        self._now = clock.now
        self._wake = wake
        self._links = PeerLinks(agent, clock.now, self._on_lost)
        self._side = WriterSide(memory.num_blocks, clock.now, wake, self._block_s)
        self._sent = SentBytes()
        self._writer_side = SenderSide(self._memory, self._links, self._sent, clock.now)
        self._lock = threading.Lock()  # guards the tables of open and used leases
        self._open: dict[str, LeaseWriter] = {}
        self._used: dict[str, float] = {}  # closed leases, oldest first: when to forget each

    @property
    def wire(self) -> Wire | None:
        return self._memory.wire

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_writing(self) -> bool:
        """Whether a write is in flight or waits until its bytes are in the memory, or bytes are coded or
        summed. Agent's thread."""
        return any(writer.is_writing for writer in self._writers())

    @property
    def sent(self) -> SentTotals:
        """What was sent since the start."""
        coding = {} if self.wire is None else vars(self.wire.counts)
        return SentTotals(**vars(self._sent), **coding)

    @property
    def links(self) -> dict[str, Link]:
        """The link to every agent whose speed has been measured. Any thread."""
        return self._links.measured

    def open(self, received: ReceivedGrant) -> Outgoing:
        """Take up a grant; after its time is over it can only be aborted.

        Raises LayoutMismatchError, which names the difference, if the two sides do not fit, and TransferError
        if the lease was opened before; then no event follows.
        """
        grant = received.grant
        difference = self._memory.contract.difference(grant.contract)
        if difference is not None:
            raise LayoutMismatchError(f"lease {grant.lease_id}: {difference}")
        coding = None
        if self.wire is not None and grant.coded is not None:
            coding = GroupCoding(self.wire, grant.coded)
        outgoing = Outgoing(received, coding, self._side)
        writer = LeaseWriter(outgoing, self._writer_side)
        with self._lock:
            if grant.lease_id in self._open or grant.lease_id in self._used:
                raise TransferError(f"lease {grant.lease_id} was opened before; it can be written once")
            self._open[grant.lease_id] = writer
        self._wake()
        return outgoing

    def abort_all(self, reason: str) -> None:
        for writer in self._writers():
            writer.outgoing.abort(reason)

    def poll(self) -> Iterator[SendEvent]:
        """Posts what was asked for, looks at the writes in flight, and yields the ends of leases, each as it
        comes; to be exhausted. What the leases want coded and summed on a GPU is launched at the end,
        together."""
        for writer in self._writers():
            try:
                event = writer.advance()
            except Exception as error:  # a bug; it must not cost the other leases their progress
                raise_if_device_lost(error)
                logger.exception("lease %s cannot be sent", writer.outgoing.lease_id)
                event = writer.fail_by_bug(TransferError(f"internal error: {error!r}"))
            if event is not None:
                self._close(writer)
                yield event
        self._memory.begin()

    def fail_all(self, error: TransferError) -> list[SendEvent]:
        """The agent is closed: every open lease ends here, and its owner is not notified."""
        writers = self._writers()
        for writer in writers:
            self._close(writer)
        return [SendFailed(writer.outgoing.lease_id, error) for writer in writers]

    def _writers(self) -> list[LeaseWriter]:
        with self._lock:
            return list(self._open.values())

    def _block_s(self, agent_metadata: bytes, is_coded: bool) -> float | None:
        """Seconds that a block takes to this agent, as measured. Any thread."""
        bytes_per_s = self._links.bytes_per_s(agent_metadata)
        if bytes_per_s is None:
            return None
        wire = self.wire if is_coded else None
        return self._memory.memory.layout.block_bytes * (1.0 if wire is None else wire.ratio) / bytes_per_s

    def _on_lost(self, peer: str, error: TransferError) -> None:
        for writer in list(self._open.values()):
            if writer.peer == peer:
                writer.lose_peer(error)

    def _close(self, writer: LeaseWriter) -> None:
        """Forget a lease except for its name, which is kept while its grant could come again and look
        alive."""
        outgoing = writer.outgoing
        if outgoing.coding is not None:
            outgoing.coding.free()
        with self._lock:
            self._open.pop(outgoing.lease_id, None)
            self._used[outgoing.lease_id] = self._now() + outgoing.grant.ttl_s
            while self._used and self._used[first := next(iter(self._used))] <= self._now():
                del self._used[first]
