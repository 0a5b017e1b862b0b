"""Leases of a worker with several processes (ranks), each of which has a share of every block in its memory.

Rank 0 decides, the others follow. `GroupTransferEngine` takes the engine's calls, passes them to rank 0's own
transfer engine and orders the other ranks to do the same (`RankFollower`). Rank i of the writer writes to
rank i of the owner; a grant carries the grants of the other ranks as `shards`. For the engine there is one
lease. Its event comes when all ranks have had theirs; it is a success if all were. Only then are the blocks
free on every rank.

    rank 0                                        rank i
    grant          ── EngineOrder ──▶             transfer_engine.grant
                   ◀── Granted ──                 waited for, so that no writer can be there before the lease
    cancel, revoke, note_writer
                   ── EngineOrder ──▶             the same
    open           ── OpenOrder(shard i - 1) ─▶   transfer_engine.open write          ── LeaseOrder(…, mark)
    ──▶     outgoing.write, ready when rank i's forward has come to `mark` finish, abort  ── LeaseOrder ──▶
    the same on_event(i, …) ◀── RankEvent ──               of its transfer engine

If the transfer of one rank fails, the writer aborts those of the others. Pipes keep their order; a pipe that
ends is the end of the group.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from cluster.types.curves import CodecSpeed, Link
from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, Mark, ReceivedGrant, ReceivedTotals, SentTotals
from kv_transfer.agents.agent import LayoutMismatchError, TransferError
from kv_transfer.lease.events import Completed, Finished, LateWrite, TransferEngineFailed, TransferEvent
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.rank_follower import (
    EngineOrder,
    Granted,
    LeaseOrder,
    OpenOrder,
    Order,
    RankEvent,
    RankFailed,
    RankReady,
    Report,
    next_message,
)
from kv_transfer.lease.transfer_engine import TransferEngine

Totals = TypeVar("Totals", SentTotals, ReceivedTotals)

ANSWER_TIMEOUT_S = 10.0  # normally a fraction of a millisecond


class RankLink:
    """Rank 0's end of the pipe to another rank."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()  # several threads send
        # None: the pipe has ended
        self._answers: queue.SimpleQueue[RankReady | Granted | None] = queue.SimpleQueue()
        self.failure: RankFailed | None = None  # why the rank ends, if it could report it
        self.sent = SentTotals()  # of that rank, when its last event came
        self.received = ReceivedTotals()  # likewise

    def order(self, order: Order) -> None:
        """Never raises: the end of the pipe shows that the rank is gone."""
        with self._lock, suppress(OSError):
            self._connection.send(order)

    def wait_ready(self, timeout_s: float) -> None:
        """Raises TransferError if the rank does not get ready in time."""
        self._answer(timeout_s)

    def wait_granted(self, lease_id: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Grant:
        """The grant that was ordered for this lease. Raises TransferError if it does not come in time. A
        grant of an earlier lease, which came too late for that one, is discarded."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._answer(max(0.0, deadline - time.monotonic()))
            assert isinstance(answer, Granted)
            if answer.grant.lease_id == lease_id:
                return answer.grant

    def listen(self, on_event: Callable[[TransferEvent], None]) -> None:
        """Blocks until the pipe ends, or the rank reports that it does; for a thread of its own."""
        try:
            while self.failure is None and (report := next_message(self._connection)) is not None:
                self.on_report(report, on_event)
        finally:
            self._answers.put(None)
            self._connection.close()

    def on_report(self, report: Report, on_event: Callable[[TransferEvent], None]) -> None:
        if isinstance(report, RankEvent):
            self.sent, self.received = report.sent, report.received
            on_event(report.event)
        elif isinstance(report, RankFailed):
            self.failure = report
        else:
            self._answers.put(report)

    def _answer(self, timeout_s: float) -> RankReady | Granted:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TransferError("a rank of this worker did not answer in time") from None
        if answer is None:
            raise TransferError("a rank of this worker has ended; its log says why")
        return answer


def _sum(totals: Sequence[Totals]) -> Totals:
    return type(totals[0])(*map(sum, zip(*map(msgspec.structs.astuple, totals), strict=True)))


def order_all(links: Sequence[RankLink], order: Order) -> None:
    for link in links:
        link.order(order)


@dataclass
class _GroupLease:
    """A lease of all ranks."""

    outgoing: GroupOutgoing | None = None  # of a writer
    events: dict[int, TransferEvent] = field(default_factory=dict)  # by rank
    failure: TransferEvent | None = None  # the first event that is not a success


class GroupTransferEngine:
    """`TransferEngine` over all ranks. Its owner passes the events of every rank to `on_event`."""

    def __init__(
        self,
        transfer_engine: TransferEngine,
        links: Sequence[RankLink],
        on_group_event: Callable[[TransferEvent], None],
        now: Callable[[], Mark],
    ):
        """`on_group_event` is called on the threads that bring events. It also gets the events of leases that
        rank 0's transfer engine has without this object. `now`: where rank 0's forward is."""
        self._transfer_engine = transfer_engine
        self._links = links
        self._on_group_event = on_group_event
        self._now = now
        self._lock = threading.Lock()
        self._leases: dict[str, _GroupLease] = {}

    @property
    def sent(self) -> SentTotals:
        """What all ranks have sent; of the others, when they last ended a lease. The errors of the codec are
        rank 0's."""
        own = self._transfer_engine.sent
        totals = _sum([own, *(link.sent for link in self._links)])
        return msgspec.structs.replace(totals, key_error=own.key_error, value_error=own.value_error)

    @property
    def received(self) -> ReceivedTotals:
        """What all ranks have received; of the others, when they last ended a lease."""
        return _sum([self._transfer_engine.received, *(link.received for link in self._links)])

    @property
    def links(self) -> dict[str, Link]:
        """Each rank sends its share: rank 0's speed times the number of ranks."""
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
        first_blocks: Sequence[int] = (),
    ) -> Grant:
        """`Receiver.grant`. Waits for the other ranks; raises TransferError if one does not answer. Then the
        lease is revoked on all ranks; only rank 0's end of it is delivered."""
        with self._lock:
            self._leases[lease_id] = _GroupLease()
        blocks, lengths, firsts = tuple(block_ids), tuple(run_lengths), tuple(first_blocks)
        arguments = lease_id, blocks, tuple(generations), ttl_s, lengths, firsts
        order_all(self._links, EngineOrder("grant", arguments))
        own = self._transfer_engine.grant(*arguments)
        try:
            shards = tuple(link.wait_granted(lease_id) for link in self._links)
        except TransferError as error:
            with self._lock:
                del self._leases[lease_id]
            self.revoke(lease_id, error.message)
            raise
        return msgspec.structs.replace(own, shards=shards)

    def cancel(self, lease_id: str) -> None:
        self._transfer_engine.cancel(lease_id)
        order_all(self._links, EngineOrder("cancel", (lease_id,)))

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        self._transfer_engine.note_writer(lease_id, processes)
        order_all(self._links, EngineOrder("note_writer", (lease_id, tuple(processes))))

    def revoke(self, lease_id: str, reason: str) -> None:
        self._transfer_engine.revoke(lease_id, reason)
        order_all(self._links, EngineOrder("revoke", (lease_id, reason)))

    def open(self, received: ReceivedGrant) -> GroupOutgoing:
        """`Sender.open`. Raises LayoutMismatchError if the owner has another number of ranks."""
        grant, expires_at = received.grant, received.expires_at
        ours, theirs = len(self._links) + 1, len(grant.shards) + 1
        if ours != theirs:
            raise LayoutMismatchError(
                f"lease {grant.lease_id}: tensor_parallel_size is {ours} here and {theirs} there"
            )
        lease = _GroupLease()
        with self._lock:
            if grant.lease_id in self._leases:
                raise TransferError(f"lease {grant.lease_id} was opened before; it can be written once")
            self._leases[grant.lease_id] = lease
        own_grant = msgspec.structs.replace(grant, shards=())
        try:
            own = self._transfer_engine.open(ReceivedGrant(own_grant, expires_at))
        except TransferError:
            with self._lock:
                del self._leases[grant.lease_id]
            raise
        outgoing = GroupOutgoing(own, self._links, self._now)
        for link, shard in zip(self._links, grant.shards, strict=True):
            link.order(OpenOrder(ReceivedGrant(shard, expires_at)))  # processes of one host share a clock
        with self._lock:  # a later failure finds what to abort; an earlier one is looked up here
            lease.outgoing, failure = outgoing, lease.failure
        if failure is not None:
            outgoing.abort(f"another rank has failed: {failure}")
        return outgoing

    def on_event(self, rank: int, event: TransferEvent) -> None:
        if isinstance(event, TransferEngineFailed | LateWrite):
            return self._on_group_event(event)
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
                self._on_group_event(event)
        elif is_over:
            self._on_group_event(lease.failure or lease.events[0])
        elif is_first_failure and outgoing is not None:
            outgoing.abort(f"rank {rank} has failed: {event}")


class GroupOutgoing:
    """`Outgoing`, on all ranks."""

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
        """`Outgoing.write`, on the thread that runs the model: another rank writes when its forward has come
        to where rank 0's is now."""
        self._own.write(local_block_ids, grant_indices, segment_ids, ready)
        segments = None if segment_ids is None else tuple(segment_ids)
        arguments = (tuple(local_block_ids), tuple(grant_indices), segments)
        order_all(self._links, LeaseOrder(self.lease_id, "write", arguments, self._now()))

    def finish(self, payload: bytes) -> None:
        """`Outgoing.finish`; rank 0's notification carries the payload."""
        self._own.finish(payload)
        order_all(self._links, LeaseOrder(self.lease_id, "finish", (b"",)))

    def abort(self, reason: str) -> None:
        self._own.abort(reason)
        order_all(self._links, LeaseOrder(self.lease_id, "abort", (reason,)))
