"""One lease on the writer's agent thread: posts what is queued, waits for its arrival, notifies the owner.

    open --finish--> draining --all writes DONE--> summing --checksums there, done notified--> Finished
    any --abort--> draining --nothing under way, abort notified--> SendAborted
    any --write, peer or clock fails--> draining --nothing under way, abort tried--> SendFailed

Nothing is posted after the grant's deadline, which is checked before each post. A write that was posted
cannot be called off: the transport reads its source and writes its target until it is DONE or FAILED. So the
lease stays open until then, also after its deadline, and its source blocks stay out of use. Then an abort
reports to the owner that bytes were written, perhaps after the owner gave the blocks away. If the peer stays
unreachable, the lease waits until the transport gives the connection up (PeerLostError).

Coding and summing read the source blocks, too, and may take several rounds on a GPU. They are under way like
a write: the lease ends after them, whatever has happened meanwhile. Once all bytes are in the owner's memory,
the deadline does not matter any more.

No abort is sent if a write failed, a post failed midway, or the peer is lost: what was posted may still land,
so only the owner's timer may end the lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from cluster.kvcache.memory import BlockMemory, block_descriptors
from kv_transfer.agents.agent import (
    NotPostedError,
    PeerLostError,
    TransferError,
    TransferHandle,
    TransferState,
)
from kv_transfer.agents.regions import merged
from kv_transfer.codecs.checksum import Checksum
from kv_transfer.codecs.pending import Pending
from kv_transfer.lease.envelope import Envelope, NoticeKind, digest_grant, encode
from kv_transfer.lease.events import Finished, SendAborted, SendEvent, SendFailed
from kv_transfer.lease.group_coding import BlockWrite, CodedWrite
from kv_transfer.lease.link_meter import PeerLinks
from kv_transfer.lease.memories import TransferMemory
from kv_transfer.lease.outgoing import Outgoing, QueuedWrite, expired

# Of one write. Every descriptor takes 16 bytes in a message of the collective transport, which has a limit.
MAX_DESCRIPTORS = 1 << 16


@dataclass
class SentBytes:
    """The bytes that all leases of a sender have sent. The fields are those of `SentTotals`."""

    raw_bytes: int = 0
    coded_bytes: int = 0


@dataclass(frozen=True)
class SenderSide:
    """What all lease writers of one sender share. Agent's thread."""

    memory: TransferMemory
    links: PeerLinks
    sent: SentBytes
    now: Callable[[], float]


@dataclass(frozen=True)
class Summing:
    """The checksums that the owner gets, of what was written raw and coded."""

    written: tuple[int, ...]
    checksum: Pending[Checksum]
    coded: tuple[int, ...]
    coded_checksum: Pending[Checksum] | None

    def is_done(self) -> bool:
        coded = self.coded_checksum
        return self.checksum.is_done() and (coded is None or coded.is_done())

    def told_in(self, envelope: Envelope) -> Envelope:
        coded = None if self.coded_checksum is None else self.coded_checksum.value()
        return msgspec.structs.replace(
            envelope,
            written=self.written,
            checksum=self.checksum.value(),
            coded=self.coded,
            coded_checksum=coded,
        )


class LeaseWriter:
    def __init__(self, outgoing: Outgoing, side: SenderSide):
        self.outgoing = outgoing
        self.peer: str | None = None  # once connected
        self._memory = side.memory
        self._links = side.links
        self._sent = side.sent
        self._now = side.now
        self._in_flight: list[TransferHandle] = []
        self._coded: list[CodedWrite] = []  # not yet posted
        self._summing: Summing | None = None
        self._has_posted = False
        self._error: TransferError | None = None
        # Bytes may still land: the owner must not be notified that the writer has stopped.
        self._is_silent = False

    @property
    def is_writing(self) -> bool:
        """Whether the next `advance` may find something done."""
        return bool(self._in_flight or self._coded or self._summing or self.outgoing.queued)

    def advance(self) -> SendEvent | None:
        """One round; the event that ends the lease, or None. Belongs to `Sender.poll`."""
        outgoing = self.outgoing
        # Read before the queue: writes queued before finish are seen now, a later abort in the next round.
        payload, abort_reason = outgoing.payload, outgoing.abort_reason
        is_aborted = abort_reason is not None
        try:
            self._post_queued(is_aborted=is_aborted)
            self._post_coded(is_aborted=is_aborted)
        except TransferError as error:
            self._fail(error)
        self._settle()
        is_sent = payload is not None and not (outgoing.queued or self._coded or self._in_flight)
        if not is_sent and not is_aborted and self._now() >= outgoing.expires_at:
            self._fail(expired(outgoing.grant))
        if self._in_flight or self._coded:
            return None
        if self._error is None and not is_aborted:
            if not is_sent:
                return None
            self._summing = self._summing or self._begin_summing()
        if self._summing is not None and not self._summing.is_done():
            return None
        return self._conclude(payload, abort_reason)

    def lose_peer(self, error: TransferError) -> None:
        """The peer is gone: the lease fails, once its writes are over, without a word to the owner."""
        self._error = self._error or error
        self._is_silent = True

    def fail_by_bug(self, error: TransferError) -> SendEvent | None:
        """`advance` raised. The lease fails once its writes are over; if it failed before, it ends now."""
        if self._error is not None:
            return SendFailed(self.outgoing.lease_id, error)
        self._fail(error)
        return None

    def _post_queued(self, is_aborted: bool) -> None:
        queued = self.outgoing.queued
        while queued:
            if self._error is not None or is_aborted:
                queued.clear()
                return
            if (ready := queued[0].ready) is not None and not ready():
                return
            self._post_write(queued.popleft())

    def _post_write(self, write: QueuedWrite) -> None:
        peer = self._connect()
        grant, coding, raw = self.outgoing.grant, self.outgoing.coding, write.sources
        if coding is not None:
            coded, raw = coding.encode(write.sources, write.segment_ids)
            if coded is not None:
                self._coded.append(coded)
                self._post_coded()
        if raw:
            remote_ids = [grant.block_ids[place] for place in raw]
            blocks = BlockWrite(list(raw.values()), remote_ids, write.segment_ids)
            self._sent.raw_bytes += self._post(
                peer, self._memory.memory, blocks, grant.base_address, grant.num_blocks
            )

    def _post_coded(self, is_aborted: bool = False) -> None:
        """What is coded by now; of a lease that has failed it is dropped."""
        for coded in [each for each in self._coded if each.coding.is_done()]:
            self._coded.remove(coded)
            if self._error is None and not is_aborted:
                coded.coding.value()
                coding = self.outgoing.coding
                assert coding is not None
                part = coding.part
                self._sent.coded_bytes += self._post(
                    self._connect(), coding.wire.memory, coded.write, part.base_address, part.num_blocks
                )

    def _post(
        self, peer: str, memory: BlockMemory, write: BlockWrite, base_address: int, num_blocks: int
    ) -> int:
        """Posts from one memory to the owner's memory of the same layout, as writes of a bounded number of
        descriptors. Blocks that are successive on both sides share one, whatever the order of their ids: a
        pool gives blocks that were used out in falling runs. Returns the number of bytes."""
        local, remote = merged(
            memory.descriptors(write.local_ids, write.segment_ids),
            block_descriptors(memory.layout, base_address, num_blocks, write.remote_ids, write.segment_ids),
        )
        for start in range(0, len(local), MAX_DESCRIPTORS):
            part = slice(start, start + MAX_DESCRIPTORS)
            self._post_rows(peer, local[part], remote[part])
        return int(local[:, 1].sum())

    def _post_rows(self, peer: str, local: np.ndarray, remote: np.ndarray) -> None:
        posted_at = self._now()
        if posted_at >= self.outgoing.expires_at:
            raise expired(self.outgoing.grant)
        try:
            self._in_flight.append(self._links.post(peer, local, remote, posted_at))
        except NotPostedError:
            raise
        except Exception:
            self._is_silent = True  # a part may have been posted
            raise
        self._has_posted = True

    def _connect(self) -> str:
        if self.peer is None:
            self.peer = self._links.connect(self.outgoing.grant.agent_metadata)
        return self.peer

    def _settle(self) -> None:
        """Releases the writes that are over."""
        self._in_flight = [handle for handle in self._in_flight if self._is_pending(handle)]

    def _is_pending(self, handle: TransferHandle) -> bool:
        """If not, the handle is released. A write that failed fails the lease."""
        error = TransferError(f"lease {self.outgoing.lease_id}: a write failed")
        try:
            state = self._links.poll(self.peer or "", handle)
        except TransferError as raised:
            state, error = TransferState.FAILED, raised
        if state is TransferState.PENDING:
            return True
        self._links.release(handle)
        if state is TransferState.FAILED:
            self._is_silent = True
            self._fail(error)
        return False

    def _fail(self, error: TransferError) -> None:
        self._error = self._error or error
        self.outgoing.queued.clear()
        self._lose_peer_if_gone(error)

    def _lose_peer_if_gone(self, error: TransferError) -> None:
        if isinstance(error, PeerLostError) and self.peer is not None:
            self._links.lose(self.peer, error)

    def _conclude(self, payload: bytes | None, abort_reason: str | None) -> SendEvent:
        lease_id = self.outgoing.lease_id
        if self._error is None and abort_reason is None:
            assert payload is not None
            try:
                self._notify(NoticeKind.DONE, payload)
                return Finished(lease_id)
            except TransferError as error:
                self._fail(error)
                self._is_silent = True  # it is unknown whether the owner got it; the owner's timer decides
        if not self._is_silent:
            reason = str(self._error) if self._error is not None else abort_reason
            try:
                self._notify(NoticeKind.ABORT, (reason or "").encode())
            except TransferError as error:  # the owner's timer ends the lease
                self._lose_peer_if_gone(error)
        if self._error is not None:
            return SendFailed(lease_id, self._error)
        return SendAborted(lease_id, abort_reason or "")

    def _notify(self, kind: NoticeKind, payload: bytes) -> None:
        outgoing = self.outgoing
        envelope = Envelope(outgoing.lease_id, digest_grant(outgoing.grant), kind, payload)
        if kind is NoticeKind.DONE:
            assert self._summing is not None
            envelope = self._summing.told_in(envelope)
        elif self._has_posted:
            coded = () if outgoing.coding is None else tuple(outgoing.coding.coded_groups)
            written = tuple(sorted(outgoing.sources))
            envelope = msgspec.structs.replace(envelope, written=written, coded=coded)
        self._links.notify(self._connect(), encode(envelope))

    def _begin_summing(self) -> Summing:
        coding, sources, memory = self.outgoing.coding, self.outgoing.sources, self._memory
        raw, groups, coded_sum = sorted(sources), {}, None
        if coding is not None:
            assert memory.wire_sums is not None
            raw = [place for place in raw if not coding.covers(place)]
            groups = coding.coded_groups
            coded_sum = memory.wire_sums.of(list(groups.values()))
        found = memory.sums.of([sources[place] for place in raw])
        return Summing(tuple(raw), found, tuple(groups), coded_sum)
