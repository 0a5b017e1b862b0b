"""The owner's half of a lease: lets one writer into some blocks, and says when nobody can write to them any
more.

In call order:

    owner   grant(lease_id, block_ids, generations, ttl_s) -> Grant; the side channel takes it to the writer
    owner   poll(), again and again, while `num_open` > 0
    owner   cancel(lease_id), if the bytes are no longer wanted; the blocks stay out of use
    writer  done: poll() returns Completed | writer stopped: Aborted | silence for ttl + margin: Expired

    open --done--> Completed            open --abort--> Aborted            open --ttl + margin--> Expired
    open --cancel--> unwanted    unwanted --done or abort--> Aborted    unwanted --ttl + margin--> Expired
    open --foreign digest--> refused    refused ends like unwanted    open --done, other bytes--> Aborted

Exactly one event per lease, and only after it may the owner free or reuse the blocks. The margin is what
makes expiry safe: the writer posts nothing after `ttl_s` from receipt, so the margin must cover the grant's
way to the writer and one write in flight. A notification for a lease that is closed or was never made
(duplicate, late, foreign) changes nothing and is counted. A notification that names other blocks or
generations than the lease is never accepted: bytes went somewhere unknown, so the lease ends as Aborted, but
not before its real writer stopped or its time ran out. A writer that is done says what it wrote, with a checksum: bytes that
are not those end as Aborted as well. Groups that came coded (`kv_transfer.wire`) are decoded before the lease is Completed.

`poll` belongs to the agent's thread; the other calls are bookkeeping under a lock and may come from any
thread.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.clock import Clock
from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import CodedPart, Grant
from kv_transfer.agent import Agent, TransferError
from kv_transfer.envelope import Envelope, NoticeKind, contract_of, decode, digest_grant, has_checksum
from kv_transfer.wire import Wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completed:
    """All bytes are in the blocks."""

    lease_id: str
    payload: bytes  # what the writer gave to `finish`


@dataclass(frozen=True)
class Aborted:
    """The writer has stopped, or the owner did not want the bytes any more. The blocks hold rubbish."""

    lease_id: str
    reason: str


@dataclass(frozen=True)
class Expired:
    """Nothing was heard in time; the writer's right is over."""

    lease_id: str


LeaseEvent = Completed | Aborted | Expired


@dataclass
class _Lease:
    grant: Grant
    digest: bytes
    expires_at: float  # margin included
    discard_reason: str | None = None  # set: the bytes will not be accepted, for this reason
    is_settling: bool = (
        False  # its bytes are being checked and decoded: it ends right after that, and not before
    )

    @property
    def lease_id(self) -> str:
        return self.grant.lease_id


class Receiver:
    def __init__(
        self,
        agent: Agent,
        memory: BlockMemory,
        clock: Clock,
        margin_s: float = 5.0,
        model: str = "",
        wire: Wire | None = None,
    ):
        """Every other memory of the agent must be registered before: the metadata in grants is taken here, once. `model`, `wire`:
        as in `Mover`."""
        self._agent = agent
        self._memory = memory
        self._clock = clock
        self._margin_s = margin_s
        self.wire = wire
        agent.register(memory)
        if wire is not None:
            agent.register(wire.memory)
        self._metadata = agent.metadata()
        self._contract = contract_of(memory, model, "raw" if wire is None else wire.codec.name)
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._expiries: list[
            tuple[float, str]
        ] = []  # heap; entries of closed and shortened leases are skipped
        self._events: list[LeaseEvent] = []  # not yet returned by poll
        self.failure: TransferError | None = None  # of the last poll: notifications could not be read
        self.num_ignored = 0  # notifications for no open lease: late, duplicate, foreign or unreadable
        self.num_mismatched = 0  # notifications that named other blocks or generations than their lease
        self.num_corrupt = 0  # leases whose bytes were not those that were sent

    @property
    def num_open(self) -> int:
        """Leases whose event has not been delivered."""
        with self._lock:
            return len(self._leases) + len(self._events)

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
    ) -> Grant:
        """Open a lease. Returns at once; the caller keeps the blocks referenced until the lease's event. `run_lengths`: tokens of
        each prompt whose KV goes there, each from a block of its own; where nothing is said, all travels raw."""
        if len(block_ids) != len(generations) or not block_ids:
            raise ValueError(f"{len(block_ids)} blocks with {len(generations)} generations cannot be granted")
        if min(block_ids) < 0 or max(block_ids) >= self._memory.num_blocks:
            raise ValueError(f"lease {lease_id} names a block outside the memory")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"lease {lease_id} names a block twice")
        expires_at = self._clock.now() + ttl_s + self._margin_s
        with self._lock:
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id} is already open")
            grant = Grant(
                lease_id=lease_id,
                agent_metadata=self._metadata,
                base_address=self._memory.base_address,
                num_blocks=self._memory.num_blocks,
                contract=self._contract,
                block_ids=tuple(block_ids),
                generations=tuple(generations),
                ttl_s=ttl_s,
                coded=self._coded_part(run_lengths),
            )
            self._leases[lease_id] = _Lease(grant, digest_grant(grant), expires_at)
            heapq.heappush(self._expiries, (expires_at, lease_id))
        return grant

    def _coded_part(self, run_lengths: Sequence[int]) -> CodedPart | None:
        """None where nothing is to travel coded, or there is no room for it."""
        if self.wire is None or not (first_blocks := self.wire.first_blocks(run_lengths)):
            return None
        wire_ids = self.wire.try_take(len(first_blocks))
        if wire_ids is None:
            return None
        return CodedPart(
            base_address=self.wire.memory.base_address,
            num_blocks=self.wire.memory.num_blocks,
            block_ids=tuple(wire_ids),
            generations=self.wire.generations(wire_ids),
            first_blocks=tuple(first_blocks),
        )

    def cancel(self, lease_id: str) -> None:
        """The bytes are not wanted. The blocks stay out of use until the lease's event; closed leases are
        ignored.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.discard_reason is None:
                lease.discard_reason = "cancelled by the owner"

    def shorten(self, lease_id: str, ttl_s: float) -> None:
        """The caller knows that the writer posts nothing after `ttl_s` from now, for it is dead or has been told to stop. Never makes a
        lease longer; closed ones are ignored."""
        with self._lock:
            lease = self._leases.get(lease_id)
            expires_at = self._clock.now() + ttl_s + self._margin_s
            if lease is not None and expires_at < lease.expires_at:
                lease.expires_at = expires_at
                heapq.heappush(self._expiries, (expires_at, lease_id))

    def revoke(self, lease_id: str, reason: str) -> None:
        """The caller knows that the writer is dead and cannot write: the lease ends as Aborted at the next
        poll.
        """
        with self._lock:
            self._revoke(lease_id, reason)

    def revoke_all(self, reason: str) -> None:
        """`revoke` for every open lease: the agent is closed, or the memory is going away."""
        with self._lock:
            for lease_id in list(self._leases):
                self._revoke(lease_id, reason)

    def _revoke(self, lease_id: str, reason: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        if lease.is_settling:  # on the agent's thread, which reads and writes the blocks
            lease.discard_reason = reason
        else:
            self._close(lease, Aborted(lease_id, reason))

    def _close(self, lease: _Lease, event: LeaseEvent) -> None:
        """Under the lock."""
        del self._leases[lease.lease_id]
        if lease.grant.coded is not None and self.wire is not None:
            self.wire.free(lease.grant.coded.block_ids)
        self._events.append(event)

    def poll(self) -> list[LeaseEvent]:
        """Take in notifications, then let time pass. A transport that fails here does not keep leases from
        expiring.
        """
        try:
            notifications = self._agent.notifications()
            self.failure = None
        except TransferError as error:
            if self.failure is None:
                logger.warning("notifications could not be read: %s", error)
            self.failure = error
            notifications = []
        for peer, data in notifications:
            self._take(peer, data)
        with self._lock:
            self._expire()
            events, self._events = self._events, []
        return events

    def _take(self, peer: str, data: bytes) -> None:
        try:
            envelope = decode(data)
        except msgspec.MsgspecError:
            logger.warning("peer %s sent a notification that is no envelope", peer)
            self.num_ignored += 1
            return
        with self._lock:
            lease = self._leases.get(envelope.lease_id)
            if lease is not None:
                lease.is_settling = envelope.digest == lease.digest
        if lease is None:
            self.num_ignored += 1
        elif not lease.is_settling:
            self.num_mismatched += 1
            lease.discard_reason = f"writer {peer} named other blocks or generations than were granted"
            logger.error("lease %s: %s", lease.lease_id, lease.discard_reason)
        else:
            if lease.discard_reason is None and envelope.kind is NoticeKind.DONE:
                self._settle(lease, envelope, peer)
            with self._lock:
                self._close(lease, _last_event(lease, envelope))

    def _settle(self, lease: _Lease, envelope: Envelope, peer: str) -> None:
        try:
            if self._take_in(lease.grant, envelope):
                return
            self.num_corrupt += 1
            reason = f"the bytes that arrived are not those that writer {peer} sent"
        except Exception as error:  # a bug; it must not cost the other leases their notifications
            logger.exception("lease %s cannot be taken in", lease.lease_id)
            reason = f"internal error: {error!r}"
        lease.discard_reason = reason
        logger.error("lease %s: %s", lease.lease_id, reason)

    def _take_in(self, grant: Grant, envelope: Envelope) -> bool:
        """Checks all the bytes and decodes what came coded. Nobody may have to wait for it: not under the lock."""
        if not _fit(envelope.written, len(grant.block_ids)):
            return False
        if not has_checksum(self._memory, [grant.block_ids[i] for i in envelope.written], envelope.checksum):
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

    def _expire(self) -> None:
        now = self._clock.now()
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, lease_id = heapq.heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at == expires_at:
                self._close(lease, Expired(lease_id))


def _fit(places: Sequence[int], count: int) -> bool:
    return all(0 <= place < count for place in places)


def _last_event(lease: _Lease, envelope: Envelope) -> LeaseEvent:
    if lease.discard_reason is not None:
        return Aborted(lease.lease_id, lease.discard_reason)
    if envelope.kind is NoticeKind.DONE:
        return Completed(lease.lease_id, envelope.payload)
    return Aborted(lease.lease_id, envelope.payload.decode(errors="replace"))
