"""One lease from the writer's side: takes down what is to be written, whoever asks; `Sender.poll` acts on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.types.transfer import Grant, ReceivedGrant
from kv_transfer.agents.agent import LeaseExpiredError, TransferError, TransferHandle
from kv_transfer.codecs.wire import Coding

if TYPE_CHECKING:
    from kv_transfer.lease.sender import Sender


@dataclass(frozen=True)
class Write:
    sources: dict[int, int]  # place in the grant: local block
    segment_ids: tuple[int, ...] | None
    ready: Callable[[], bool] | None  # whether the bytes are in the memory yet; None: they are


class Outgoing:
    """One lease from the writer's side. Made by `Sender.open`; the fields are the sender's."""

    def __init__(self, received: ReceivedGrant, sender: Sender):
        grant = received.grant
        self.lease_id = grant.lease_id
        self._grant = grant
        self._sender = sender
        self._expires_at = received.expires_at
        self._queued: deque[Write] = deque()
        self._in_flight: list[TransferHandle] = []
        self._peer: str | None = None  # once connected
        self._sources: dict[int, int] = {}  # the local block that each of the grant's has its content from
        self._has_posted = False  # a write was begun
        self._coding: Coding | None = None  # of the groups that may travel coded
        if sender.wire is not None and grant.coded is not None:
            self._coding = Coding(sender.wire, grant.coded)
        self._payload: bytes | None = None  # finish was called
        self._abort_reason: str | None = None  # abort was called
        self._error: TransferError | None = None
        self._is_silent = False  # bytes may still land: the owner must not hear that the writer has stopped

    def write(
        self,
        local_block_ids: Sequence[int],
        grant_indices: Sequence[int],
        segment_ids: Sequence[int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Copy `local_block_ids[i]` to the grant's block number `grant_indices[i]`, in all segments or the
        given ones.

        The content must be final, or become so by the time that `ready()` is true: the agent's thread asks before it
        posts, and later writes of this lease wait behind. Raises LeaseExpiredError after the grant's time (the event still follows);
        ValueError for a call that makes no sense. Ignored once the transfer has failed: its event is on the
        way.
        """
        if len(local_block_ids) != len(grant_indices):
            raise ValueError(f"{len(local_block_ids)} blocks cannot go to {len(grant_indices)} places")
        blocks = self._grant.block_ids
        if any(not 0 <= i < len(blocks) for i in grant_indices):
            raise ValueError(f"lease {self.lease_id} has {len(blocks)} blocks; a write names another one")
        if any(not 0 <= b < self._sender.memory.num_blocks for b in local_block_ids):
            raise ValueError(f"a write for lease {self.lease_id} names a local block outside the memory")
        if self._payload is not None:
            raise ValueError(f"lease {self.lease_id} is finished; it cannot be written to")
        if self._sender.now() >= self._expires_at:
            raise expired(self._grant)
        if not local_block_ids:
            return
        sources = dict(zip(grant_indices, local_block_ids, strict=True))
        self._sources.update(sources)
        segments = None if segment_ids is None else tuple(segment_ids)
        self._queued.append(Write(sources, segments, ready))
        self._sender.wake()

    @property
    def blocks_together(self) -> int:
        """Blocks of a prompt that should be written by one call, or they cannot travel coded."""
        return 1 if self._coding is None else self._coding.wire.blocks_per_group

    @property
    def block_s(self) -> float | None:
        """Seconds in which a block has got to the owner of late; None: nothing has been measured."""
        return self._sender.block_s(self._grant.agent_metadata, self._coding is not None)

    def finish(self, payload: bytes) -> None:
        """Tell the owner, with `payload`, once all writes are in its memory. Raises like `write`."""
        if self._payload is not None:
            raise ValueError(f"lease {self.lease_id} is finished twice")
        if self._sender.now() >= self._expires_at:
            raise expired(self._grant)
        self._payload = payload
        self._sender.wake()

    def abort(self, reason: str) -> None:
        """Stop: post nothing more, wait for what is in flight, tell the owner. No effect when all is over."""
        if self._abort_reason is None:
            self._abort_reason = reason
        self._sender.wake()


def expired(grant: Grant) -> LeaseExpiredError:
    return LeaseExpiredError(f"lease {grant.lease_id} ran out {grant.ttl_s} s after its grant came")
