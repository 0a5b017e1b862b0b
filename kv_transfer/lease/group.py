"""Leases of a worker that is several processes (ranks), each with a share of every block in a memory of its own.

Rank 0 decides, the others follow: `GroupTransferEngine` takes the calls of the engine, does them with rank 0's own mover and tells them
to the other ranks, where a `RankMover` does the same with theirs. Rank i of the writer writes to rank i of the owner; a
grant carries the other ranks' grants as `shards`. To the engine a lease is one: its event comes when all ranks have had theirs,
and is a good one if all were good. Only then are the blocks free on every rank.

    rank 0                                              rank i
    grant(...)     ── ("grant", …) ──▶                  transfer_engine.grant ── ("granted", Grant) ──▶ waited for, so that a writer
                                                        can never be there before the lease
    open(received) ── ("open", shard i - 1) ─▶          transfer_engine.open
    write(...)     ── ("write", …, mark) ──▶            outgoing.write, ready when rank i's forward has come to `mark`
    finish, abort, cancel, revoke, note_writer ──▶      the same
    on_event(i, …) ◀── ("event", event, totals) ──      of its transfer_engine

If one rank's transfer goes wrong, the writer aborts those of the others. Pipes are ordered; a pipe that ends is the end of
the group.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from cluster.types.curves import CodecSpeed, Link
from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, Mark, ReceivedGrant, SentTotals
from kv_transfer.agents.agent import LayoutMismatchError, TransferError
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.receiver import Completed, LateWrite
from kv_transfer.lease.sender import Finished, SendFailed
from kv_transfer.lease.transfer_engine import TransferEngine, TransferEngineFailed, TransferEvent

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0  # normally a fraction of a millisecond

_ENDED = object()


class RankLink:
    """Rank 0's end of the pipe to another rank."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()  # several threads send
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent = SentTotals()  # by that rank, when its last event came

    def tell(self, *order: Any) -> None:
        """Never raises: that a rank is gone is what the end of its pipe says."""
        with self._lock, suppress(OSError):
            self._connection.send(order)

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The next one. Raises TransferError when it does not come."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TransferError(f"a rank of this worker gave no answer in {timeout_s:.0f} s") from None
        if answer is _ENDED:
            raise TransferError("a rank of this worker has ended; its log says why")
        return answer

    def listen(self, on_event: Callable[[TransferEvent], None]) -> None:
        """Blocks until the pipe ends; for a thread of its own."""
        try:
            while (message := _received(self._connection)) is not None:
                self.take(message, on_event)
        finally:
            self._answers.put(_ENDED)
            self._connection.close()

    def take(self, message: tuple[Any, ...], on_event: Callable[[TransferEvent], None]) -> None:
        """What that rank has sent."""
        match message:
            case ("event", event, sent):
                self.sent = sent
                on_event(event)
            case (_, answer):
                self._answers.put(answer)


def _received(connection: Connection) -> tuple[Any, ...] | None:
    """The next message; None: the pipe has ended."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


@dataclass
class _Joint:
    """A lease of all ranks."""

    outgoing: GroupOutgoing | None = None  # of a writer
    events: dict[int, TransferEvent] = field(default_factory=dict)  # by rank
    failure: TransferEvent | None = None  # the first that was none of success


class GroupTransferEngine:
    """`TransferEngine`, for all ranks at once. Its owner passes the events of rank 0's mover to `on_event`, as the links pass theirs."""

    def __init__(
        self,
        transfer_engine: TransferEngine,
        links: Sequence[RankLink],
        on_joint: Callable[[TransferEvent], None],
        now: Callable[[], Mark],
    ):
        """`on_joint` is called from the threads that bring events; leases that `mover` has without this object go through as they
        are. `now`: where rank 0's forward is."""
        self._transfer_engine = transfer_engine
        self._links = links
        self._on_joint = on_joint
        self._now = now
        self._lock = threading.Lock()
        self._leases: dict[str, _Joint] = {}

    @property
    def sent(self) -> SentTotals:
        """By all ranks; of the others, when they last ended a lease."""
        own, others = self._transfer_engine.sent, [link.sent for link in self._links]
        return msgspec.structs.replace(
            own,
            raw_bytes=own.raw_bytes + sum(other.raw_bytes for other in others),
            coded_bytes=own.coded_bytes + sum(other.coded_bytes for other in others),
            coded_groups=own.coded_groups + sum(other.coded_groups for other in others),
            crowded_groups=own.crowded_groups + sum(other.crowded_groups for other in others),
        )

    @property
    def links(self) -> dict[str, Link]:
        """Of all ranks together, each of which sends its share: as fast as rank 0's, times their number."""
        own, num_ranks = self._transfer_engine.links, 1 + len(self._links)
        return {peer: Link(link.latency_s, num_ranks * link.bytes_per_s) for peer, link in own.items()}

    @property
    def codecs(self) -> dict[str, CodecSpeed]:
        """Likewise: each rank codes its share."""
        num_ranks = 1 + len(self._links)
        own = self._transfer_engine.codecs
        return {name: CodecSpeed(speed.ratio, speed.s_per_byte / num_ranks) for name, speed in own.items()}

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
    ) -> Grant:
        """`TransferEngine.grant`. Waits for the other ranks; raises TransferError when one does not answer."""
        with self._lock:
            self._leases[lease_id] = _Joint()
        for link in self._links:
            link.tell("grant", lease_id, tuple(block_ids), tuple(generations), ttl_s, tuple(run_lengths))
        own = self._transfer_engine.grant(lease_id, block_ids, generations, ttl_s, run_lengths)
        return msgspec.structs.replace(own, shards=tuple(link.answer() for link in self._links))

    def cancel(self, lease_id: str) -> None:
        """`TransferEngine.cancel`."""
        self._transfer_engine.cancel(lease_id)
        for link in self._links:
            link.tell("cancel", lease_id)

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """`TransferEngine.note_writer`."""
        self._transfer_engine.note_writer(lease_id, processes)
        for link in self._links:
            link.tell("writer", lease_id, processes)

    def revoke(self, lease_id: str, reason: str) -> None:
        """`TransferEngine.revoke`."""
        self._transfer_engine.revoke(lease_id, reason)
        for link in self._links:
            link.tell("revoke", lease_id, reason)

    def open(self, received: ReceivedGrant) -> GroupOutgoing:
        """`TransferEngine.open`. Raises LayoutMismatchError when the owner has another number of ranks."""
        grant, expires_at = received.grant, received.expires_at
        if len(grant.shards) != len(self._links):
            raise LayoutMismatchError(
                f"lease {grant.lease_id}: tensor_parallel_size is {len(self._links) + 1} here and {len(grant.shards) + 1} there"
            )
        lease = _Joint()
        with self._lock:
            if grant.lease_id in self._leases:
                raise TransferError(f"lease {grant.lease_id} was opened before; it can be written once")
            self._leases[grant.lease_id] = lease
        try:
            own = self._transfer_engine.open(
                ReceivedGrant(msgspec.structs.replace(grant, shards=()), expires_at)
            )
        except TransferError:
            with self._lock:
                del self._leases[grant.lease_id]
            raise
        outgoing = GroupOutgoing(own, self._links, self._now)
        for link, shard in zip(self._links, grant.shards, strict=True):
            link.tell("open", ReceivedGrant(shard, expires_at))  # of one host, whose processes share a clock
        with self._lock:  # from here on a failure finds what to abort; those before are looked up now
            lease.outgoing, failure = outgoing, lease.failure
        if failure is not None:
            outgoing.abort(f"another rank has failed: {failure}")
        return outgoing

    def on_event(self, rank: int, event: TransferEvent) -> None:
        if isinstance(event, TransferEngineFailed | LateWrite):
            return self._on_joint(event)
        with self._lock:
            lease = self._leases.get(event.lease_id)
            if lease is not None:
                is_first_failure = lease.failure is None and not isinstance(event, Completed | Finished)
                lease.events[rank] = event
                if is_first_failure:
                    lease.failure = event
                is_over = len(lease.events) == 1 + len(self._links)
                if is_over:
                    del self._leases[event.lease_id]
                outgoing = lease.outgoing
        if lease is None:
            if rank == 0:
                self._on_joint(event)
        elif is_over:
            self._on_joint(lease.failure or lease.events[0])
        elif is_first_failure and outgoing is not None:
            outgoing.abort(f"rank {rank} has failed: {event}")


class GroupOutgoing:
    """`Outgoing`, on all ranks at once."""

    def __init__(self, own: Outgoing, links: Sequence[RankLink], now: Callable[[], Mark]):
        self.lease_id = own.lease_id
        self._own = own
        self._links = links
        self._now = now

    @property
    def blocks_together(self) -> int:
        return self._own.blocks_together

    @property
    def block_s(self) -> float | None:
        return self._own.block_s

    def write(
        self,
        local_block_ids: Sequence[int],
        grant_indices: Sequence[int],
        segment_ids: Sequence[int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """`Outgoing.write`: on the thread that runs the model, because the other ranks write when their forwards have come to
        where rank 0's is now."""
        self._own.write(local_block_ids, grant_indices, segment_ids, ready)
        segments = None if segment_ids is None else tuple(segment_ids)
        places = (tuple(local_block_ids), tuple(grant_indices), segments)
        for link in self._links:
            link.tell("write", self.lease_id, places, self._now())

    def finish(self, payload: bytes) -> None:
        self._own.finish(payload)
        for link in self._links:
            link.tell("finish", self.lease_id)

    def abort(self, reason: str) -> None:
        self._own.abort(reason)
        for link in self._links:
            link.tell("abort", self.lease_id, reason)


class RankMover:
    """Any other rank's end: does with its mover what rank 0 did with his. Made before the transfer_engine, whose events it reports."""

    def __init__(self, connection: Connection, has: Callable[[Mark], bool]):
        """`has`: whether this rank's forwards have come to that moment, and what they wrote is in the memory; any thread."""
        self._connection = connection
        self._has = has
        self._lock = threading.Lock()  # its thread and the mover's send, and look leases up
        self._open: dict[str, Outgoing] = {}

    def attach(self, transfer_engine: TransferEngine) -> None:
        """Once, before the first order."""
        self._transfer_engine = transfer_engine

    def on_event(self, event: TransferEvent) -> None:
        """Of the transfer_engine, on its thread."""
        if not isinstance(event, TransferEngineFailed):  # which is in the log
            with self._lock:
                self._open.pop(event.lease_id, None)
            self.send("event", event, self._transfer_engine.sent)

    def send(self, *message: Any) -> None:
        with self._lock, suppress(OSError):  # rank 0 is gone: `run` sees it too
            self._connection.send(message)

    def run(self) -> None:
        """Blocks until the pipe ends; for a thread of its own."""
        while (order := _received(self._connection)) is not None:
            self.do(order)

    def do(self, order: tuple[Any, ...]) -> None:
        """What rank 0 has told."""
        transfer_engine = self._transfer_engine
        match order:
            case ("grant", *arguments):
                self.send("granted", transfer_engine.grant(*arguments))
            case ("cancel", lease_id):
                transfer_engine.cancel(lease_id)
            case ("writer", lease_id, processes):
                transfer_engine.note_writer(lease_id, processes)
            case ("revoke", lease_id, reason):
                transfer_engine.revoke(lease_id, reason)
            case ("open", received):
                try:
                    with self._lock:
                        self._open[received.grant.lease_id] = transfer_engine.open(received)
                except TransferError as error:
                    self.on_event(SendFailed(received.grant.lease_id, error))
            case (verb, lease_id, *arguments):
                if (outgoing := self._open.get(lease_id)) is not None:
                    with suppress(TransferError):  # its time is over, as its event will say
                        self._write(outgoing, verb, *arguments)

    def _write(self, outgoing: Outgoing, verb: str, *arguments: Any) -> None:
        match verb, *arguments:
            case ("write", (local_ids, grant_indices, segments), mark):
                outgoing.write(local_ids, grant_indices, segments, lambda: self._has(mark))
            case ("finish",):
                outgoing.finish(b"")
            case ("abort", reason):
                outgoing.abort(reason)
