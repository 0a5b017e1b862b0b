"""Leases in virtual time: as `TransferEngine` to its callers. Nothing is in the bytes; their number and the
link say when they are there. What one worker writes goes through its link in order. KV follows the layers of
the step that computes it: bytes that are posted after a step began to leave when the first layer was done, if
the grant was there by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from cluster.types.curves import CodecSpeed, Link
from cluster.types.members import ProcessId
from cluster.types.transfer import Contract, Grant, ReceivedGrant, ReceivedTotals, SentTotals
from deploy.simulator.events import EventLoop, VirtualClock
from kv_transfer.agents.agent import PeerLostError
from kv_transfer.lease.events import Aborted, Completed, Finished, SendAborted, SendFailed, TransferEvent

CONTRACT = Contract(0, "", 0, (), "", "")


class SimTransfer:
    """What one worker writes, and what is written to it. `peers` has those of all workers, by name."""

    sent, received = SentTotals(), ReceivedTotals()
    codecs: ClassVar[dict[str, CodecSpeed]] = {}

    def __init__(
        self,
        name: str,
        peers: dict[str, SimTransfer],
        loop: EventLoop,
        clock: VirtualClock,
        *,
        block_bytes: int,
        num_layers: int,
        link_to: Callable[[str], Link],
        began_at: Callable[[], float],
        on_event: Callable[[TransferEvent], None],
    ):
        """`block_bytes`: of what is written from here. `link_to`: a worker's link to the one of this name.
        `began_at()`: when the last step that computed such bytes began."""
        peers[name] = self
        self.name, self.is_dead = name, False
        self.agent = self  # only its metadata is asked for
        self._peers, self._loop, self.clock = peers, loop, clock
        self.block_bytes, self.num_layers = block_bytes, num_layers
        self.link_to, self.began_at, self._on_event = link_to, began_at, on_event
        self._came_at: dict[str, float] = {}  # grants to this worker that it has not taken up, by lease
        self._granted: dict[str, SimOutgoing | None] = {}  # open leases on this worker's memory, by id
        self.free_at = 0.0  # when its link has taken all that was posted
        self._links: dict[str, Link] = {}

    def metadata(self) -> bytes:
        return self.name.encode()

    @property
    def links(self) -> dict[str, Link]:
        return self._links

    # The owner's

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
        first_blocks: Sequence[int] = (),
    ) -> Grant:
        self._granted[lease_id] = None
        return Grant(
            lease_id,
            self.metadata(),
            0,
            0,
            CONTRACT,
            tuple(block_ids),
            tuple(generations),
            ttl_s,
            tuple(first_blocks),
        )

    def cancel(self, lease_id: str) -> None:
        """The writer stops, if there is one."""
        if lease_id in self._granted and (writer := self._granted[lease_id]) is not None:
            writer.abort("cancelled")
        else:
            self.revoke(lease_id, "cancelled")

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """Simulated writers stop at once."""

    def revoke(self, lease_id: str, reason: str) -> None:
        if self._granted.pop(lease_id, self) is not self:
            self.tell(Aborted(lease_id, reason))

    # The writer's

    def expect(self, grant: Grant) -> None:
        """The grant has come; the engine that takes it up may be in a step."""
        self._came_at[grant.lease_id] = self.clock.now()

    def open(self, received: ReceivedGrant) -> SimOutgoing:
        """Raises PeerLostError if the owner has ended."""
        grant = received.grant
        came_at = self._came_at.pop(grant.lease_id, self.clock.now())
        owner = self._peers.get(name := grant.agent_metadata.decode())
        if owner is None:
            raise PeerLostError(f"{name} is gone")
        return SimOutgoing(self, owner, grant.lease_id, came_at)

    def use(self, lease_id: str, writer: SimOutgoing) -> bool:
        """A worker is about to write. False: it may not any more."""
        if lease_id not in self._granted:
            return False
        self._granted[lease_id] = writer
        return True

    def close(self, lease_id: str, event: TransferEvent) -> None:
        """The writer has ended the lease."""
        if self._granted.pop(lease_id, self) is not self:
            self.tell(event)

    def lose(self) -> None:
        """The process has ended. What it was writing is not there; what is written to it fails."""
        self.is_dead = True
        del self._peers[self.name]
        for writer in [each for each in self._granted.values() if each is not None]:
            writer.fail()

    def note_link(self, peer: str, link: Link) -> None:
        self._links[peer.rpartition("/")[0]] = link

    def tell(self, event: TransferEvent) -> None:
        """The event is delivered at this clock's instant."""
        self.clock.plan(self._tell, event)

    def _tell(self, event: TransferEvent) -> None:
        if not self.is_dead:
            self._on_event(event)

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        self._loop.at(when, call, *args)


class SimOutgoing:
    """One lease from the writer's side."""

    blocks_together, block_s = 1, None

    def __init__(self, source: SimTransfer, owner: SimTransfer, lease_id: str, granted_at: float):
        self.lease_id = lease_id
        self._source, self._owner = source, owner
        self._granted_at, self._there_at = granted_at, source.clock.now()
        self._is_over = False
        if not owner.use(lease_id, self):
            self.abort("the lease is over")

    def write(
        self,
        local_block_ids: Sequence[int],
        grant_indices: Sequence[int],
        segment_ids: Sequence[int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        source, now = self._source, self._source.clock.now()
        link, num_bytes = source.link_to(self._owner.name), len(local_block_ids) * source.block_bytes
        layer_share = 1 / source.num_layers
        began_at = min(now, source.began_at())
        first_layer_at = began_at + layer_share * (now - began_at)
        begins_at = max(source.free_at, min(now, max(self._granted_at, first_layer_at)))
        seconds = num_bytes / link.bytes_per_s
        source.free_at = max(begins_at + seconds, now + layer_share * seconds)
        self._there_at = source.free_at + link.latency_s
        source.note_link(self._owner.name, link)

    def finish(self, payload: bytes) -> None:
        latency_s = self._source.link_to(self._owner.name).latency_s
        there_at = max(self._there_at, self._source.clock.now() + latency_s)
        self._source.at(there_at, self._arrive, payload)

    def abort(self, reason: str) -> None:
        self._end(SendAborted(self.lease_id, reason), Aborted(self.lease_id, reason))

    def fail(self) -> None:
        """The owner has ended."""
        self._end(SendFailed(self.lease_id, PeerLostError(f"{self._owner.name} is gone")), None)

    def _arrive(self, payload: bytes) -> None:
        if not self._source.is_dead:
            self._end(Finished(self.lease_id), Completed(self.lease_id, payload))

    def _end(self, sent: TransferEvent, received: TransferEvent | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._source.tell(sent)
        if received is not None:
            self._owner.close(self.lease_id, received)
