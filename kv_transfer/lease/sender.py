"""The writer's half of a lease: writes blocks into a peer's memory and says so, once.

In call order:

    outgoing = sender.open(received)                     the grant, and when its time is over: counted from its receipt
    outgoing.write(local_block_ids, grant_indices)       any number of times, while the rest is computed
    outgoing.finish(payload)  or  outgoing.abort(reason) once; abort may also follow finish, and may repeat
    sender.poll()                                        again and again while `num_open` > 0

    open --finish--> draining --all writes DONE, done notified--> Finished
    open, draining --abort--> draining --no write in flight, abort notified--> SendAborted
    open, draining --write, peer or clock fails--> draining --no write in flight, abort tried--> SendFailed

Every `open` that returned ends in exactly one event, also without finish or abort: the grant's time runs out.
Until that event the local blocks belong to the transport and must not be freed. Nothing is posted from the grant's deadline on, which
is checked before each post. A write that is still in flight then is cancelled, its peer disconnected if it cannot be,
and the owner is left to its own timer (no abort is sent, because bytes might still land). A process that was stopped between the check
and the write may write later still: then its last notification, done or abort, says to the owner where. A lease is written
once: its grant is refused when it comes again.

Whole groups of blocks travel coded where the grant has room for that, this side has too, and it pays (`kv_transfer.codecs.wire`). That is
decided once for each lease and once for each group, because a group goes layer by layer.

The methods of `Sender.open` and `Outgoing` only take the wish down and may be called from any thread. `poll`
acts on it and belongs to the agent's thread; a write may copy inside it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cluster.clock import Clock
from cluster.kvcache.memory import BlockMemory, block_descriptors
from cluster.types.curves import Link
from cluster.types.transfer import ReceivedGrant, SentTotals
from kv_transfer.agents.agent import (
    Agent,
    LayoutMismatchError,
    PeerLostError,
    TransferError,
    TransferHandle,
    TransferState,
)  # fmt: skip
from kv_transfer.codecs.wire import BlockWrite, Wire
from kv_transfer.lease.envelope import (
    Envelope,
    NoticeKind,
    checksum_blocks,
    contract_of,
    digest_grant,
    encode,
)
from kv_transfer.lease.link import LinkMeter
from kv_transfer.lease.outgoing import Outgoing, Write, expired

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """All bytes are in the peer's memory and it was told so."""

    lease_id: str


@dataclass(frozen=True)
class SendAborted:
    """The caller's abort is complete: nothing is in flight and the peer was told, if it lives."""

    lease_id: str
    reason: str


@dataclass(frozen=True)
class SendFailed:
    lease_id: str
    error: TransferError


SendEvent = Finished | SendAborted | SendFailed


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
        """`wake` is called when there is something new for `poll` to do, from the caller's thread. `model`, `wire`: as in `TransferEngine`."""
        self._agent = agent
        self.memory = memory
        self.wire = wire
        self.wake = wake
        self.now = clock.now
        agent.register(memory)
        if wire is not None:
            agent.register(wire.memory)
        self._contract = contract_of(memory, model, "raw" if wire is None else wire.codec.name)
        self._links: dict[str, LinkMeter] = {}  # by peer
        self._peers: dict[bytes, str] = {}  # by what their grants say of their agents
        self._lock = threading.Lock()  # guards the two tables
        self._open: dict[str, Outgoing] = {}
        self._used: deque[tuple[float, str]] = deque()  # (when, lease) of closed leases, oldest first
        self._used_ids: set[str] = set()
        self._num_raw_bytes = self._num_coded_bytes = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def sent(self) -> SentTotals:
        """Since the start."""
        totals = SentTotals(self._num_raw_bytes, self._num_coded_bytes)
        if self.wire is None:
            return totals
        return msgspec.structs.replace(totals, **vars(self.wire.counts))

    @property
    def links(self) -> dict[str, Link]:
        """To every agent whose speed has been measured. Any thread."""
        meters = list(self._links.items())
        return {
            peer: Link(meter.latency_s, meter.bytes_per_s)
            for peer, meter in meters
            if meter.bytes_per_s is not None
        }

    def block_s(self, agent_metadata: bytes, is_coded: bool) -> float | None:
        """Seconds that a block takes to this agent, as measured. Any thread."""
        link = self._links.get(self._peers.get(agent_metadata, ""))
        if link is None or link.bytes_per_s is None:
            return None
        wire = self.wire if is_coded else None
        return self.memory.layout.block_bytes * (1.0 if wire is None else wire.ratio) / link.bytes_per_s

    def open(self, received: ReceivedGrant) -> Outgoing:
        """Take a grant up, before or after its time is over: then it can only be aborted.

        Raises LayoutMismatchError, which names the difference, when the two sides do not fit and TransferError when the lease was opened
        before; no event follows then.
        """
        grant = received.grant
        difference = self._contract.difference(grant.contract)
        if difference is not None:
            raise LayoutMismatchError(f"lease {grant.lease_id}: {difference}")
        outgoing = Outgoing(received, self)
        with self._lock:
            if grant.lease_id in self._open or grant.lease_id in self._used_ids:
                raise TransferError(f"lease {grant.lease_id} was opened before; it can be written once")
            self._open[grant.lease_id] = outgoing
        self.wake()
        return outgoing

    def abort_all(self, reason: str) -> None:
        with self._lock:
            outgoings = list(self._open.values())
        for outgoing in outgoings:
            outgoing.abort(reason)

    def poll(self) -> list[SendEvent]:
        """Post what was asked for, see how writes are doing, and return what has ended."""
        with self._lock:
            outgoings = list(self._open.values())
        events: list[SendEvent] = []
        for outgoing in outgoings:
            try:
                event = self._advance(outgoing)
            except Exception as error:  # a bug; it must not cost the other leases their progress
                logger.exception("lease %s cannot be sent", outgoing.lease_id)
                self._release_all(outgoing)
                event = SendFailed(outgoing.lease_id, TransferError(f"internal error: {error!r}"))
            if event is not None:
                self._close(outgoing)
                events.append(event)
        return events

    def fail_all(self, error: TransferError) -> list[SendEvent]:
        """The agent is closed: every open lease ends here, unheard by its owner."""
        with self._lock:
            outgoings = list(self._open.values())
        for outgoing in outgoings:
            self._close(outgoing)
        return [SendFailed(outgoing.lease_id, error) for outgoing in outgoings]

    def _advance(self, outgoing: Outgoing) -> SendEvent | None:
        # Read before the queue: writes queued before finish are seen now, a later abort in the next round.
        payload, abort_reason = outgoing._payload, outgoing._abort_reason
        try:
            self._post_queued(outgoing, is_aborted=abort_reason is not None)
        except TransferError as error:
            self._fail(outgoing, error)
        try:
            self._settle(
                outgoing
            )  # also behind a failed post: the owner is told only if nothing is in flight
        except TransferError as error:
            self._fail(outgoing, error)
        is_over = self.now() >= outgoing._expires_at
        if outgoing._in_flight:
            if is_over:
                self._abandon(outgoing)
            else:
                return None
        if outgoing._error is None and abort_reason is None and (payload is None or outgoing._queued):
            if not is_over:
                return None
            self._fail(outgoing, expired(outgoing._grant))
        return self._conclude(outgoing, payload, abort_reason)

    def _post_queued(self, outgoing: Outgoing, is_aborted: bool) -> None:
        while outgoing._queued:
            if outgoing._error is not None or is_aborted:
                outgoing._queued.clear()
                return
            if (ready := outgoing._queued[0].ready) is not None and not ready():
                return
            self._post_write(outgoing, outgoing._queued.popleft())

    def _post_write(self, outgoing: Outgoing, write: Write) -> None:
        peer = self._connect(outgoing)
        grant, coding, raw = outgoing._grant, outgoing._coding, write.sources
        if coding is not None:
            coded, raw = coding.encode(write.sources, write.segment_ids)
            if coded.local_ids:
                part = coding.part
                self._post(outgoing, peer, coding.wire.memory, coded, part.base_address, part.num_blocks)
        if raw:
            remote_ids = [grant.block_ids[place] for place in raw]
            blocks = BlockWrite(list(raw.values()), remote_ids, write.segment_ids)
            self._post(outgoing, peer, self.memory, blocks, grant.base_address, grant.num_blocks)

    def _post(
        self,
        outgoing: Outgoing,
        peer: str,
        memory: BlockMemory,
        write: BlockWrite,
        base_address: int,
        num_blocks: int,
    ) -> None:
        """From one memory to the owner's of the same layout."""
        local = memory.descriptors(write.local_ids, write.segment_ids)
        remote = block_descriptors(
            memory.layout, base_address, num_blocks, write.remote_ids, write.segment_ids
        )
        posted_at = self.now()
        if posted_at >= outgoing._expires_at:
            raise expired(outgoing._grant)
        outgoing._has_posted = True
        outgoing._in_flight.append(self._agent.post(peer, local, remote))
        num_bytes = int(local[:, 1].sum())
        self._links.setdefault(peer, LinkMeter()).posted(num_bytes, posted_at)
        if memory is self.memory:
            self._num_raw_bytes += num_bytes
        else:
            self._num_coded_bytes += num_bytes

    def _connect(self, outgoing: Outgoing) -> str:
        if outgoing._peer is None:
            metadata = outgoing._grant.agent_metadata
            outgoing._peer = self._peers[metadata] = self._agent.connect(metadata)
        return outgoing._peer

    def _settle(self, outgoing: Outgoing) -> None:
        """Release what is over. Raises for a failed write; the others stay in flight."""
        failed = 0
        still_in_flight: list[TransferHandle] = []
        handles, outgoing._in_flight = outgoing._in_flight, still_in_flight
        for position, handle in enumerate(handles):
            try:
                state = self._agent.poll(handle)
            except TransferError:
                still_in_flight.extend(handles[position:])
                raise
            if state is TransferState.PENDING:
                still_in_flight.append(handle)
                continue
            if (link := self._links.get(outgoing._peer or "")) is not None:
                if state is TransferState.DONE:
                    link.arrived(self.now())
                else:
                    link.cancelled()
            failed += state is TransferState.FAILED
            self._release(outgoing, handle)
        if failed:
            raise TransferError(f"lease {outgoing.lease_id}: {failed} writes failed")

    def _fail(self, outgoing: Outgoing, error: TransferError) -> None:
        outgoing._error = outgoing._error or error
        outgoing._queued.clear()
        if isinstance(error, PeerLostError) and outgoing._peer is not None:
            self._lose_peer(outgoing._peer, error)

    def _lose_peer(self, peer: str, error: TransferError) -> None:
        """The peer is gone for all leases at once; what is in flight to it will never end by itself."""
        for outgoing in list(self._open.values()):
            if outgoing._peer == peer:
                outgoing._error = outgoing._error or error
                outgoing._is_silent = True
                self._release_all(outgoing)
        self._links.pop(peer, None)
        self._peers = {metadata: name for metadata, name in self._peers.items() if name != peer}
        self._agent.disconnect(peer)

    def _abandon(self, outgoing: Outgoing) -> None:
        """Time is over with writes in flight: take the source away from them."""
        outgoing._error = outgoing._error or expired(outgoing._grant)
        outgoing._is_silent = True
        self._release_all(outgoing)

    def _release_all(self, outgoing: Outgoing) -> None:
        handles, outgoing._in_flight = outgoing._in_flight, []
        for handle in handles:
            self._release(outgoing, handle)
            if (link := self._links.get(outgoing._peer or "")) is not None:
                link.cancelled()

    def _release(self, outgoing: Outgoing, handle: TransferHandle) -> None:
        try:
            self._agent.release(handle)
        except TransferError:
            outgoing._is_silent = True
            if outgoing._peer is not None:
                self._agent.disconnect(outgoing._peer)  # ends the transfer together with its connection

    def _conclude(self, outgoing: Outgoing, payload: bytes | None, abort_reason: str | None) -> SendEvent:
        if outgoing._error is None and abort_reason is None:
            assert payload is not None
            try:
                self._notify(outgoing, NoticeKind.DONE, payload)
                return Finished(outgoing.lease_id)
            except TransferError as error:
                self._fail(outgoing, error)
                outgoing._is_silent = True  # whether the owner has heard is unknown; its timer decides
        if not outgoing._is_silent:
            reason = str(outgoing._error) if outgoing._error is not None else abort_reason
            try:
                self._notify(outgoing, NoticeKind.ABORT, (reason or "").encode())
            except TransferError as error:  # the owner's timer ends the lease
                if isinstance(error, PeerLostError) and outgoing._peer is not None:
                    self._lose_peer(outgoing._peer, error)
        if outgoing._error is not None:
            return SendFailed(outgoing.lease_id, outgoing._error)
        return SendAborted(outgoing.lease_id, abort_reason or "")

    def _notify(self, outgoing: Outgoing, kind: NoticeKind, payload: bytes) -> None:
        envelope = Envelope(outgoing.lease_id, digest_grant(outgoing._grant), kind, payload)
        if kind is NoticeKind.DONE:
            envelope = self._with_checksums(outgoing, envelope)
        elif outgoing._has_posted:
            coded = () if outgoing._coding is None else tuple(outgoing._coding.coded_groups)
            written = tuple(sorted(outgoing._sources))
            envelope = msgspec.structs.replace(envelope, written=written, coded=coded)
        self._agent.notify(self._connect(outgoing), encode(envelope))

    def _with_checksums(self, outgoing: Outgoing, envelope: Envelope) -> Envelope:
        coding, raw = outgoing._coding, sorted(outgoing._sources)
        if coding is not None:
            raw = [place for place in raw if not coding.covers(place)]
            groups = coding.coded_groups
            found = checksum_blocks(coding.wire.memory, list(groups.values()))
            envelope = msgspec.structs.replace(envelope, coded=tuple(groups), coded_checksum=found)
        found = checksum_blocks(self.memory, [outgoing._sources[place] for place in raw])
        return msgspec.structs.replace(envelope, written=tuple(raw), checksum=found)

    def _close(self, outgoing: Outgoing) -> None:
        """Forget a lease but for its name, which is kept as long as its grant could come again and look
        alive.
        """
        outgoing._error = outgoing._error or TransferError("this lease is over")
        if outgoing._coding is not None:
            outgoing._coding.release()
        with self._lock:
            self._open.pop(outgoing.lease_id, None)
            self._used.append((self.now() + outgoing._grant.ttl_s, outgoing.lease_id))
            self._used_ids.add(outgoing.lease_id)
            while self._used and self._used[0][0] <= self.now():
                self._used_ids.discard(self._used.popleft()[1])
