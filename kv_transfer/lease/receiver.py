"""The owner's half of leases: opens some blocks to one writer, and says when the blocks may be used again.

In call order:

    owner   grant(lease_id, block_ids, generations, ttl_s) -> Grant; the side channel takes it to the writer
    owner   poll(), again and again, while `num_open` > 0
    owner   note_writer(lease_id, processes), when the door has said which processes were given the grant
    owner   cancel(lease_id), if the bytes are no longer wanted; the blocks stay out of use
    writer  done: poll() returns Completed | writer stopped: Aborted | silence for ttl + margin: Expired

    open --abort--> Aborted             open --ttl + margin--> Expired
    open --cancel--> unwanted    unwanted --done or abort--> Aborted    unwanted --ttl + margin--> Expired
    open --foreign digest--> refused    refused ends like unwanted
    open --done--> settling --bytes right--> Completed    settling --other bytes, cancel, revoke--> Aborted
    open, unwanted, refused --all processes of the writer have ended, and IN_FLIGHT_S later--> Aborted

A lease has exactly one event. Only after it may the owner free or reuse the blocks. A notification

* for a lease that has ended by the writer's word, or that never existed (duplicate, foreign): changes nothing
  and is counted;
* that names other blocks or generations than the lease: is never accepted. Its bytes went to an unknown
  place, so the lease will end as Aborted, but not before its real writer has stopped or its time is over;
* of a writer that is done: says what was written, with a checksum. If the bytes do not match, the lease ends
  as Aborted. Groups that came coded (`kv_transfer.codecs.wire_memory`) are decoded before the lease is
  Completed. Meanwhile the lease is settling: on a GPU over several polls, which look and do not wait. Nothing
  ends it before the device is done with its blocks.

Why no late write reaches a block that has a new holder. Writes are one-sided: the owner cannot refuse one,
and registered memory stays writable. So blocks are fenced, out of use, until one of these is known:

1. The writer's word, done or abort. It is sent after the last write, so no write of this writer follows it.
2. No process was given the grant (`revoke`). The door says so, because it alone passes grants on, or it has
   never read the grant (`cluster.worker.shell`).
3. The writer's processes have ended. The kernel that runs both says so (`kv_transfer.lease.processes`). What
   they had handed to a socket or a network arrives within IN_FLIGHT_S, or not at all. A broken connection is
   no such proof.
4. ttl + margin are over. The writer posts nothing later than `ttl_s` after receipt and checks that before
   each post. A write can land later only if a process was stopped between check and write, a grant was on
   its way, or a write in flight stood still, for longer than the margin. The margin is longer than Serve lets
   a replica live that does not answer.

Only the fourth is a bound on time and not a fact. Such a lease is remembered as taken back. If its writer
runs again after all, its word comes after its last write and says that it has written. Then leases that are
open on those blocks end as Aborted, and the owner gets a `LateWrite`: everything that reads those blocks must
fail.

`poll` belongs to the agent's thread; the other calls, bookkeeping under a lock, to any thread.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from cluster.clock import Clock
from cluster.kvcache.memory import BlockMemory
from cluster.lost_device import raise_if_device_lost
from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, ReceivedTotals
from kv_transfer.agents.agent import Agent, TransferError
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.envelope import Envelope, NoticeKind, decode, digest_grant
from kv_transfer.lease.events import Aborted, Completed, Expired, LateWrite, LeaseEvent
from kv_transfer.lease.memories import IncomingMemory

logger = logging.getLogger(__name__)

# Polling every few milliseconds, the owner's side takes in what the sockets of a dead writer hold.
IN_FLIGHT_S = 2.0
LOOK_EVERY_S = 0.25  # at the writers' processes
TAKEN_BACK_S = 3600.0  # a lease is remembered for so long if its writer has said nothing
MAX_TAKEN_BACK = 10_000


@dataclass
class _Lease:
    grant: Grant
    digest: bytes
    expires_at: float  # margin included
    processes: tuple[ProcessId, ...] = ()  # of the writer, once they are known
    is_orphaned: bool = False  # they have ended
    discard_reason: str | None = None  # set: the bytes will not be accepted, for this reason
    settling: _Settling | None = None  # its writer is done

    @property
    def lease_id(self) -> str:
        return self.grant.lease_id


@dataclass(frozen=True)
class _Settling:
    """The bytes of a lease are being checked and decoded; it ends right after that."""

    envelope: Envelope
    peer: str
    bytes_in: Iterator[bool | None]  # `IncomingMemory.take_in`


class Receiver:
    def __init__(
        self,
        agent: Agent,
        memory: BlockMemory,
        clock: Clock,
        margin_s: float,
        model: str,
        wire: Wire | None,
        has_ended: Callable[[ProcessId], bool],
    ):
        """Every other memory of the agent must be registered before, because the metadata in grants is read
        once, here. `model`, `wire`, `has_ended`: see `TransferEngine`."""
        self._agent = agent
        self._incoming = IncomingMemory(agent, memory, model, wire)
        self._clock = clock
        self._margin_s = margin_s
        self._has_ended = has_ended
        self._metadata = agent.metadata()
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._expiries: list[tuple[float, str]] = []  # heap; skipped: entries of closed, orphaned leases
        self._look_at = 0.0  # when the writers' processes are looked at next
        self._taken_back: OrderedDict[str, tuple[float, Grant]] = OrderedDict()  # until when, ascending
        self._events: list[LeaseEvent | LateWrite] = []  # not yet returned by poll
        self.failure: TransferError | None = None  # of the last poll: notifications could not be read
        self.num_ignored = 0  # the fields of `ReceivedTotals`
        self.num_late = 0
        self.num_mismatched = 0
        self.num_corrupt = 0
        self.spared_bytes = 0

    @property
    def wire(self) -> Wire | None:
        return self._incoming.wire

    @property
    def num_open(self) -> int:
        """Leases whose event has not been delivered."""
        with self._lock:
            return len(self._leases) + len(self._events)

    @property
    def is_settling(self) -> bool:
        """Whether the next `poll` may find that bytes are checked or decoded. Agent's thread."""
        return bool(self._settling_leases())

    @property
    def totals(self) -> ReceivedTotals:
        counts = (self.num_ignored, self.num_late, self.num_mismatched, self.num_corrupt)
        return ReceivedTotals(*counts, self.spared_bytes)

    @property
    def is_waiting_for_late_words(self) -> bool:
        """Whether the writer of a lease that was taken back may still report: `poll` must be called now and
        then."""
        return bool(self._taken_back)

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
        first_blocks: Sequence[int] = (),
    ) -> Grant:
        """Open a lease. Returns at once; the caller keeps the blocks referenced until the lease's event.

        `run_lengths`: tokens of each prompt whose KV goes there, each prompt from a block of its own; empty:
        all travels raw. `first_blocks`: of each prompt, how many blocks at its start the caller has already;
        empty: none. `block_ids` are the other blocks, prompt after prompt, each prompt's followed by those of
        its state; with `first_blocks` there may be none.
        """
        self._check(lease_id, block_ids, generations, first_blocks)
        expires_at = self._clock.now() + ttl_s + self._margin_s
        with self._lock:
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id} is already open")
            grant = Grant(
                lease_id=lease_id,
                agent_metadata=self._metadata,
                base_address=self._incoming.memory.base_address,
                num_blocks=self._incoming.memory.num_blocks,
                contract=self._incoming.contract,
                block_ids=tuple(block_ids),
                generations=tuple(generations),
                ttl_s=ttl_s,
                first_blocks=tuple(first_blocks),
                coded=self._incoming.coded_part(run_lengths, first_blocks, len(block_ids)),
            )
            self._leases[lease_id] = _Lease(grant, digest_grant(grant), expires_at)
            heapq.heappush(self._expiries, (expires_at, lease_id))
        return grant

    def cancel(self, lease_id: str) -> None:
        """The bytes are not wanted. The blocks stay out of use until the lease's event. Closed leases are
        ignored."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.discard_reason is None:
                lease.discard_reason = "cancelled by the owner"

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """The grant was passed to these processes and to no others. Closed leases are ignored."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.processes = tuple(processes)

    def revoke(self, lease_id: str, reason: str) -> None:
        """The caller knows that no process can write: the lease ends as Aborted at the next poll."""
        with self._lock:
            self._revoke(lease_id, reason)

    def revoke_all(self, reason: str) -> None:
        """Every open lease ends with the next poll, settling or not: the agent's thread has stopped and its
        stream is empty."""
        with self._lock:
            for lease in list(self._leases.values()):
                self._close(lease, Aborted(lease.lease_id, reason))

    def poll(self) -> Iterator[LeaseEvent | LateWrite]:
        """Takes in notifications, then lets time pass; yields each end as it comes; to be exhausted. If the
        transport fails here, leases expire all the same."""
        try:
            notifications = self._agent.notifications()
            self.failure = None
        except TransferError as error:
            if self.failure is None:
                logger.warning("notifications could not be read: %s", error)
            self.failure = error
            notifications = []
        for lease in self._settling_leases():
            self._settle(lease)
            yield from self._take_events()
        for peer, data in notifications:
            self._on_notification(peer, data)
            yield from self._take_events()
        self._incoming.begin()
        with self._lock:
            self._look_at_writers()
            self._expire()
        yield from self._take_events()

    def _settling_leases(self) -> list[_Lease]:
        with self._lock:  # other threads grant
            return [lease for lease in self._leases.values() if lease.settling is not None]

    def _take_events(self) -> list[LeaseEvent | LateWrite]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def _check(
        self, lease_id: str, block_ids: Sequence[int], generations: Sequence[int], first_blocks: Sequence[int]
    ) -> None:
        if len(block_ids) != len(generations) or not (block_ids or first_blocks):
            raise ValueError(f"{len(block_ids)} blocks with {len(generations)} generations cannot be granted")
        if any(not 0 <= block_id < self._incoming.memory.num_blocks for block_id in block_ids):
            raise ValueError(f"lease {lease_id} names a block outside the memory")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"lease {lease_id} names a block twice")
        if any(first < 0 for first in first_blocks):
            raise ValueError(f"lease {lease_id} begins before a prompt")

    def _revoke(self, lease_id: str, reason: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.settling is not None:  # the blocks are being read and written
            lease.discard_reason = reason
        elif lease is not None:
            self._close(lease, Aborted(lease_id, reason))

    def _close(self, lease: _Lease, event: LeaseEvent) -> None:
        """Ends the lease with this event. Called under the lock."""
        del self._leases[lease.lease_id]
        self._incoming.free_wire(lease.grant)
        if isinstance(event, Completed):
            self.spared_bytes += sum(lease.grant.first_blocks) * self._incoming.memory.layout.block_bytes
        self._events.append(event)

    def _on_notification(self, peer: str, data: bytes) -> None:
        try:
            envelope = decode(data)
        except msgspec.MsgspecError:
            logger.warning("peer %s sent a notification that is no envelope", peer)
            self.num_ignored += 1
            return
        with self._lock:
            lease = self._leases.get(envelope.lease_id)
            if lease is not None:
                self._on_word(lease, envelope, peer)
        if lease is None:
            self._on_word_without_lease(peer, envelope)
        elif lease.settling is not None:
            self._settle(lease)

    def _on_word(self, lease: _Lease, envelope: Envelope, peer: str) -> None:
        """Takes in a writer's notification. Called under the lock."""
        if lease.settling is not None:  # its writer has said its last word
            self.num_ignored += 1
        elif envelope.digest != lease.digest:
            self.num_mismatched += 1
            lease.discard_reason = f"writer {peer} named other blocks or generations than were granted"
            logger.error("lease %s: %s", lease.lease_id, lease.discard_reason)
        elif lease.discard_reason is None and envelope.kind is NoticeKind.DONE:
            lease.settling = _Settling(envelope, peer, self._incoming.take_in(lease.grant, envelope))
        else:
            self._close(lease, _last_event(lease, envelope))

    def _on_word_without_lease(self, peer: str, envelope: Envelope) -> None:
        with self._lock:
            _, grant = self._taken_back.pop(envelope.lease_id, (0.0, None))
            if grant is None or not (envelope.written or envelope.coded):
                self.num_ignored += 1
                return
            self.num_late += 1
            block_ids, wire_ids = _blocks_of(grant)
            for lease in self._leases.values():
                blocks, wire_blocks = _blocks_of(lease.grant)
                is_hit = not block_ids.isdisjoint(blocks) or not wire_ids.isdisjoint(wire_blocks)
                if is_hit and lease.discard_reason is None:
                    lease.discard_reason = "an earlier writer of its blocks wrote late"
            self._events.append(LateWrite(envelope.lease_id, tuple(sorted(block_ids))))
        logger.error("writer %s wrote after lease %s had been taken back", peer, envelope.lease_id)

    def _settle(self, lease: _Lease) -> None:
        """Closes the lease if its bytes are checked and decoded. Not under the lock: on the CPU it takes as
        long as reading all the bytes."""
        settling = lease.settling
        assert settling is not None
        reason = None
        try:
            is_right = next(settling.bytes_in, None)
            if is_right is None:
                return
            if not is_right:
                self.num_corrupt += 1
                reason = f"the bytes that arrived are not those that writer {settling.peer} sent"
        except Exception as error:  # a bug; it must not cost the other leases their notifications
            raise_if_device_lost(error)
            logger.exception("lease %s cannot be taken in", lease.lease_id)
            reason = f"internal error: {error!r}"
        if reason is not None:
            logger.error("lease %s: %s", lease.lease_id, reason)
        with self._lock:
            lease.discard_reason = reason or lease.discard_reason
            self._close(lease, _last_event(lease, settling.envelope))

    def _look_at_writers(self) -> None:
        now = self._clock.now()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        leases = [
            lease
            for lease in self._leases.values()
            if lease.processes and not lease.is_orphaned and lease.settling is None
        ]
        processes = {process for lease in leases for process in lease.processes}
        ended = {process for process in processes if self._has_ended(process)}
        for lease in leases:
            if ended.issuperset(lease.processes):
                lease.is_orphaned = True
                lease.expires_at = min(lease.expires_at, now + IN_FLIGHT_S)
                heapq.heappush(self._expiries, (lease.expires_at, lease.lease_id))

    def _expire(self) -> None:
        now = self._clock.now()
        while self._taken_back and next(iter(self._taken_back.values()))[0] <= now:
            self._taken_back.popitem(last=False)
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, lease_id = heapq.heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at == expires_at and lease.settling is None:
                if lease.is_orphaned:
                    self._close(lease, Aborted(lease_id, "the process that was to write has ended"))
                else:
                    self._close(lease, Expired(lease_id))
                    self._taken_back[lease_id] = (now + TAKEN_BACK_S, lease.grant)
        while len(self._taken_back) > MAX_TAKEN_BACK:
            self._taken_back.popitem(last=False)


def _blocks_of(grant: Grant) -> tuple[frozenset[int], frozenset[int]]:
    """Its KV or feature blocks, and its wire blocks."""
    return frozenset(grant.block_ids), frozenset(() if grant.coded is None else grant.coded.block_ids)


def _last_event(lease: _Lease, envelope: Envelope) -> LeaseEvent:
    if lease.discard_reason is not None:
        return Aborted(lease.lease_id, lease.discard_reason)
    if envelope.kind is NoticeKind.DONE:
        return Completed(lease.lease_id, envelope.payload)
    return Aborted(lease.lease_id, envelope.payload.decode(errors="replace"))
