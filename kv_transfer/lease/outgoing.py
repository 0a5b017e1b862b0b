"""One lease from the writer's side: the caller's end of it. Any thread may call; nothing is posted here.

The calls are queued, and `LeaseWriter` acts on them on the agent's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.types.transfer import Grant, ReceivedGrant
from kv_transfer.agents.agent import LeaseExpiredError
from kv_transfer.lease.group_coding import GroupCoding


@dataclass(frozen=True)
class QueuedWrite:
    sources: dict[int, int]  # place in the grant → local block
    segment_ids: tuple[int, ...] | None  # None: all
    ready: Callable[[], bool] | None  # whether the bytes are in the memory; None: they are


@dataclass(frozen=True)
class WriterSide:
    """What all leases of one sender share."""

    num_blocks: int  # of the memory that is sent from
    now: Callable[[], float]
    wake: Callable[[], None]  # called when the agent's thread has something new to do
    # by the owner's agent metadata, and whether the KV travels coded
    block_s: Callable[[bytes, bool], float | None]


class Outgoing:
    """Made by `Sender.open`. The public fields without a docstring are for the agent's thread."""

    def __init__(self, received: ReceivedGrant, coding: GroupCoding | None, side: WriterSide):
        """`coding`: of the groups that may travel coded."""
        self.grant = received.grant
        self.lease_id = received.grant.lease_id
        self.expires_at = received.expires_at
        self.coding = coding
        self.queued: deque[QueuedWrite] = deque()
        self.sources: dict[int, int] = {}  # place in the grant → the local block with its content
        self.payload: bytes | None = None  # finish was called
        self.abort_reason: str | None = None  # abort was called
        self._side = side

    def write(
        self,
        local_block_ids: Sequence[int],
        grant_indices: Sequence[int],
        segment_ids: Sequence[int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Copy `local_block_ids[i]` to block `grant_indices[i]` of the grant, in all segments or in the given
        ones.

        The content must be final, or become final before `ready()` is true: the agent's thread asks before it
        posts, and later writes of this lease wait for this one. After the transfer has failed the call is
        ignored: its event is on the way. Raises LeaseExpiredError after the grant's time (the event still
        follows), ValueError for a call that makes no sense.
        """
        if len(local_block_ids) != len(grant_indices):
            raise ValueError(f"{len(local_block_ids)} blocks cannot go to {len(grant_indices)} places")
        num_places = len(self.grant.block_ids)
        if any(not 0 <= i < num_places for i in grant_indices):
            raise ValueError(f"lease {self.lease_id} has {num_places} blocks; a write names another one")
        if any(not 0 <= b < self._side.num_blocks for b in local_block_ids):
            raise ValueError(f"a write for lease {self.lease_id} names a local block outside the memory")
        if self.payload is not None:
            raise ValueError(f"lease {self.lease_id} is finished; it cannot be written to")
        self._check_time()
        if not local_block_ids:
            return
        sources = dict(zip(grant_indices, local_block_ids, strict=True))
        self.sources.update(sources)
        segments = None if segment_ids is None else tuple(segment_ids)
        self.queued.append(QueuedWrite(sources, segments, ready))
        self._side.wake()

    @property
    def blocks_together(self) -> int:
        """Blocks of a prompt that must be written by one call if they are to travel coded; 1: any number."""
        return 1 if self.coding is None else self.coding.wire.blocks_per_group

    @property
    def block_s(self) -> float | None:
        """Seconds that a block takes to the owner, as measured lately; None: not measured."""
        return self._side.block_s(self.grant.agent_metadata, self.coding is not None)

    def finish(self, payload: bytes) -> None:
        """Notify the owner, with `payload`, when all writes are in its memory. Raises like `write`."""
        if self.payload is not None:
            raise ValueError(f"lease {self.lease_id} is finished twice")
        self._check_time()
        self.payload = payload
        self._side.wake()

    def abort(self, reason: str) -> None:
        """Stop: post nothing more, wait for what is in flight, notify the owner. No effect after the end of
        the lease."""
        if self.abort_reason is None:
            self.abort_reason = reason
        self._side.wake()

    def _check_time(self) -> None:
        if self._side.now() >= self.expires_at:
            raise expired(self.grant)


def expired(grant: Grant) -> LeaseExpiredError:
    return LeaseExpiredError(f"lease {grant.lease_id} ran out {grant.ttl_s} s after its grant came")
