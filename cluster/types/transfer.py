"""The right to write into another process's memory. The owner of the memory makes a grant. Grants travel over
the side channel only; none is ever accepted from a client."""

from __future__ import annotations

import msgspec

GROUP_TOKENS = 64  # of coded KV, which share their scales; a block has a part of a group
# A point in a model's forwards, the same on all ranks: which forward, and how many of its layers are written.
Mark = tuple[int, int]


class Contract(msgspec.Struct, frozen=True):
    """What writer and owner must have in common; otherwise the same bytes would mean different things to
    them."""

    protocol: int  # version of the leases' notifications
    model: str  # fingerprint of its configuration and dtype
    block_size: int  # rows of a block
    dtypes: tuple[str, ...]  # of the segments, each named once
    codec: str  # codec that blocks may travel in besides raw; "raw": none
    layout: str  # fingerprint of all segments

    def difference(self, other: Contract) -> str | None:
        """The first field that differs, with both values; None: the contracts are equal."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} is {ours} here and {theirs} there"
        return None


class SentTotals(msgspec.Struct, frozen=True, array_like=True):
    """What a writer has sent since its start."""

    raw_bytes: int = 0
    coded_bytes: int = 0  # as they travelled
    coded_groups: int = 0
    crowded_groups: int = 0  # groups that travelled raw because there was no room to code them
    key_error: float = 0.0  # of the last group that was checked: mean |x - x'| / mean |x|
    value_error: float = 0.0


class ReceivedTotals(msgspec.Struct, frozen=True, array_like=True):
    """What an owner of memory did not get, since it started: words of writers that it could not accept, and
    KV that it had already."""

    num_ignored: int = 0  # about no open lease: duplicate, foreign, or late but without a write
    num_late: int = 0  # of writers that wrote after their lease had been taken back
    num_mismatched: int = 0  # that named other blocks or generations than their lease
    num_corrupt: int = 0  # leases whose bytes were not those that were sent
    spared_bytes: int = 0  # of blocks before `Grant.first_blocks`, in leases that completed


class TierTotals(msgspec.Struct, frozen=True, array_like=True):
    """The second tier of a worker's KV cache: blocks since its start, and what it has now."""

    num_stored: int = 0
    num_loaded: int = 0  # back into the first tier
    num_evicted: int = 0  # for newer ones, from its last level
    num_missed: int = 0  # that had no copy yet when the first tier lost them
    num_corrupt: int = 0  # whose bytes could not be read, or were not those that were written
    num_failed: int = 0  # that could not be written
    held_bytes: int = 0


class CodedPart(msgspec.Struct, frozen=True):
    """Room in the owner's wire memory for groups of a grant's blocks. These groups travel coded."""

    base_address: int  # as in `Grant`, but of the wire memory
    num_blocks: int
    block_ids: tuple[int, ...]  # one for each group
    generations: tuple[int, ...]
    first_blocks: tuple[int, ...]  # for each group: index in the grant's blocks where it begins


class Grant(msgspec.Struct, frozen=True):
    """Write access to some blocks of one block memory, until it expires.

    A grant for KV names the blocks of a request's prompts, prompt after prompt, without those that the owner
    has already (`first_blocks`); `kv_transfer.lease.prompt_places` finds a prompt's block in it. If the owner
    has all of them, there are no blocks: the writer only sends its notification. The writer posts nothing
    later than `ttl_s` after receipt. `kv_transfer.lease.receiver` says when the owner may reuse the blocks.
    """

    lease_id: str
    agent_metadata: bytes  # opaque; gives the writer's agent the owner's name, address and registered memory
    base_address: int  # first byte of the block memory in the owner's address space
    num_blocks: int  # blocks in that memory (the stride between its segments)
    contract: Contract  # must equal the writer's own
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # generation of each block when it was granted
    ttl_s: float
    # for each prompt: its first block that travels, in blocks of that prompt; empty: all blocks travel
    first_blocks: tuple[int, ...] = ()
    coded: CodedPart | None = None
    # seconds in which the owner computes the KV of one prompt token itself; None: the owner does not compute
    # KV
    token_s: float | None = None
    # if the owner has several ranks: the grants of ranks 1, 2, … for the same blocks in their memories, for
    # the writer's ranks
    shards: tuple[Grant, ...] = ()

    def received(self, now: float) -> ReceivedGrant:
        """Call this where the grant's message arrives, before anything can delay it. `now`: by the writer's
        clock."""
        return ReceivedGrant(self, now + self.ttl_s)


class ReceivedGrant(msgspec.Struct, frozen=True):
    """A grant in the writer's process."""

    grant: Grant
    expires_at: float  # by the clock of the writer's host; from then on nothing is posted


class WriterNotice(msgspec.Struct, frozen=True, tag=True):
    """What a writer reports to the owner of the memory that it has written to, through the agents'
    notifications: the payload of its last one."""


class KvReady(WriterNotice, frozen=True):
    """All KV that travels is written. Payload of prefill's last notification."""

    first_tokens: tuple[int, ...]  # per choice
    position_deltas: tuple[int, ...]  # per prompt; mRoPE: position = context length + delta; else 0
    first_recomputed: int | None = None  # index in the prompt; decode computes the KV from this token on


class FeaturesReady(WriterNotice, frozen=True):
    media_hash: str
