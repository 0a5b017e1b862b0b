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
are not those end as Aborted as well.

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
from cluster.types.transfer import Grant
from kv_transfer.agent import Agent, TransferError
from kv_transfer.envelope import Envelope, NoticeKind, checksum_blocks, contract_of, decode, digest_blocks

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
    lease_id: str
    block_ids: tuple[int, ...]
    digest: bytes
    expires_at: float  # margin included
    discard_reason: str | None = None  # set: the bytes will not be accepted, for this reason


class Receiver:
    def __init__(
        self, agent: Agent, memory: BlockMemory, clock: Clock, margin_s: float = 5.0, model: str = ""
    ):
        """Every memory of the agent must be registered before: the metadata in grants is taken here, once. `model`: as in
        `Mover`."""
        self._agent = agent
        self._memory = memory
        self._clock = clock
        self._margin_s = margin_s
        agent.register(memory)
        self._metadata = agent.metadata()
        self._contract = contract_of(memory, model)
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._expiries: list[tuple[float, str]] = []  # heap; entries of closed leases are skipped
        self._events: list[LeaseEvent] = []  # not yet returned by poll
        self.num_ignored = 0  # notifications for no open lease: late, duplicate, foreign or unreadable
        self.num_mismatched = 0  # notifications that named other blocks or generations than their lease
        self.num_corrupt = 0  # leases whose bytes were not those that were sent

    @property
    def num_open(self) -> int:
        """Leases whose event has not been delivered."""
        with self._lock:
            return len(self._leases) + len(self._events)

    def grant(
        self, lease_id: str, block_ids: Sequence[int], generations: Sequence[int], ttl_s: float
    ) -> Grant:
        """Open a lease. Returns at once; the caller keeps the blocks referenced until the lease's event."""
        if len(block_ids) != len(generations) or not block_ids:
            raise ValueError(f"{len(block_ids)} blocks with {len(generations)} generations cannot be granted")
        if min(block_ids) < 0 or max(block_ids) >= self._memory.num_blocks:
            raise ValueError(f"lease {lease_id} names a block outside the memory")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"lease {lease_id} names a block twice")
        expires_at = self._clock.now() + ttl_s + self._margin_s
        lease = _Lease(lease_id, tuple(block_ids), digest_blocks(block_ids, generations), expires_at)
        with self._lock:
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id} is already open")
            self._leases[lease_id] = lease
            heapq.heappush(self._expiries, (expires_at, lease_id))
        return Grant(
            lease_id=lease_id,
            agent_metadata=self._metadata,
            base_address=self._memory.base_address,
            num_blocks=self._memory.num_blocks,
            contract=self._contract,
            block_ids=tuple(block_ids),
            generations=tuple(generations),
            ttl_s=ttl_s,
        )

    def cancel(self, lease_id: str) -> None:
        """The bytes are not wanted. The blocks stay out of use until the lease's event; closed leases are
        ignored.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.discard_reason is None:
                lease.discard_reason = "cancelled by the owner"

    def revoke(self, lease_id: str, reason: str) -> None:
        """The caller knows that the writer is dead and cannot write: the lease ends as Aborted at the next
        poll.
        """
        with self._lock:
            if self._leases.pop(lease_id, None) is not None:
                self._events.append(Aborted(lease_id, reason))

    def revoke_all(self, reason: str) -> None:
        """`revoke` for every open lease: the agent is closed, or the memory is going away."""
        with self._lock:
            self._events.extend(Aborted(lease_id, reason) for lease_id in self._leases)
            self._leases.clear()

    def poll(self) -> list[LeaseEvent]:
        """Take in notifications, then let time pass. A transport that fails here does not keep leases from
        expiring.
        """
        try:
            notifications = self._agent.notifications()
        except TransferError as error:
            logger.warning("notifications could not be read: %s", error)
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
        if lease is None:
            self.num_ignored += 1
        elif envelope.digest != lease.digest:
            self.num_mismatched += 1
            lease.discard_reason = f"writer {peer} named other blocks or generations than were granted"
            logger.error("lease %s: %s", lease.lease_id, lease.discard_reason)
        else:
            if not self._is_intact(lease, envelope):
                self.num_corrupt += 1
                lease.discard_reason = f"the bytes that arrived are not those that writer {peer} sent"
                logger.error("lease %s: %s", lease.lease_id, lease.discard_reason)
            with self._lock:
                if self._leases.pop(lease.lease_id, None) is not None:  # not revoked meanwhile
                    self._events.append(_last_event(lease, envelope))

    def _is_intact(self, lease: _Lease, envelope: Envelope) -> bool:
        """Reads all the bytes, so nobody may have to wait for it: not under the lock."""
        if lease.discard_reason is not None or envelope.kind is NoticeKind.ABORT or envelope.checksum is None:
            return True
        if any(not 0 <= i < len(lease.block_ids) for i in envelope.written):
            return False
        found = checksum_blocks(self._memory, [lease.block_ids[i] for i in envelope.written])
        return found is None or found == envelope.checksum

    def _expire(self) -> None:
        now = self._clock.now()
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, lease_id = heapq.heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at == expires_at:
                del self._leases[lease_id]
                self._events.append(Expired(lease_id))


def _last_event(lease: _Lease, envelope: Envelope) -> LeaseEvent:
    if lease.discard_reason is not None:
        return Aborted(lease.lease_id, lease.discard_reason)
    if envelope.kind is NoticeKind.DONE:
        return Completed(lease.lease_id, envelope.payload)
    return Aborted(lease.lease_id, envelope.payload.decode(errors="replace"))
