"""The right to write into another process's memory. Grants are made by the owner of the memory and travel over the
side channel only; none is ever accepted from a client."""

from __future__ import annotations

import msgspec

Mark = tuple[
    int, int
]  # a moment of a model's forwards, the same on all ranks: which forward, and how many of its layers are written


class Contract(msgspec.Struct, frozen=True):
    """What writer and owner must have in common, or bytes mean different things to them."""

    protocol: int  # of the leases' notifications
    model: str  # fingerprint of its configuration and dtype
    block_size: int  # rows of a block
    dtypes: tuple[str, ...]  # of the segments, each named once
    codec: str  # of what travels beside raw blocks: raw, if nothing does
    layout: str  # fingerprint of all segments

    def difference(self, other: Contract) -> str | None:
        """The first field in which they differ, with both values; None: they are equal."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} is {ours} here and {theirs} there"
        return None


class SentTotals(msgspec.Struct, frozen=True, array_like=True):
    """What a writer has sent since it started."""

    raw_bytes: int = 0
    coded_bytes: int = 0  # as they travelled
    coded_groups: int = 0
    crowded_groups: int = 0  # that went raw because there was no room to code them
    key_error: float = 0.0  # of the last group that was looked at: mean |x - x'| / mean |x|
    value_error: float = 0.0


class ReceivedTotals(msgspec.Struct, frozen=True, array_like=True):
    """Words of writers that an owner of memory could not accept, since it started."""

    num_ignored: int = 0  # about no open lease: duplicate, foreign, or late but without a write
    num_late: int = 0  # of writers that wrote after their lease had been taken back
    num_mismatched: int = 0  # that named other blocks or generations than their lease
    num_corrupt: int = 0  # leases whose bytes were not those that were sent


class CodedPart(msgspec.Struct, frozen=True):
    """Room in the owner's wire memory for groups of a grant's blocks, which travel coded then."""

    base_address: int  # as in `Grant`, of the wire memory
    num_blocks: int
    block_ids: tuple[int, ...]  # one for each group
    generations: tuple[int, ...]
    first_blocks: tuple[int, ...]  # place in the grant's blocks where the group begins


class Grant(msgspec.Struct, frozen=True):
    """Write access to some blocks of one block memory, until it expires.

    Block i of the sender's message goes to `block_ids[i]`. The writer posts nothing after `ttl_s` from receipt. When the owner may
    use the blocks again: see `kv_transfer.lease.receiver`.
    """

    lease_id: str
    agent_metadata: bytes  # opaque; gives the writer's agent the owner's name, address and registered memory
    base_address: int  # first byte of the block memory in the owner's address space
    num_blocks: int  # blocks in that memory (the stride between its segments)
    contract: Contract  # must equal the writer's own
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # generation of each block when it was granted
    ttl_s: float
    coded: CodedPart | None = None
    token_s: float | None = (
        None  # in which the owner computes the KV of a prompt token itself; None: it does not
    )
    # of an owner of several ranks: those of ranks 1, 2, … for the same blocks in their memories, for the writer's ranks
    shards: tuple[Grant, ...] = ()

    def received(self, now: float) -> ReceivedGrant:
        """Called where the grant's message arrives, before anything can delay it. `now`: by the writer's clock."""
        return ReceivedGrant(self, now + self.ttl_s)


class ReceivedGrant(msgspec.Struct, frozen=True):
    """A grant in its writer's process."""

    grant: Grant
    expires_at: float  # by the clock of the writer's host: nothing is posted from then on
