"""The right to write into another process's memory. Grants are made by the owner of the memory and travel over the
side channel only; none is ever accepted from a client."""

from __future__ import annotations

import msgspec


class Contract(msgspec.Struct, frozen=True):
    """What writer and owner must have in common, or bytes mean different things to them."""

    protocol: int  # of the leases' notifications
    model: str  # fingerprint of its configuration and dtype
    block_size: int  # rows of a block
    dtypes: tuple[str, ...]  # of the segments, each named once
    layout: str  # fingerprint of all segments

    def difference(self, other: Contract) -> str | None:
        """The first field in which they differ, with both values; None: they are equal."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} is {ours} here and {theirs} there"
        return None


class Grant(msgspec.Struct, frozen=True):
    """Write access to some blocks of one block memory, until it expires.

    Block i of the sender's message goes to `block_ids[i]`. The owner frees the blocks only when the writer said that
    it is done (or has stopped), or when the lease ran out: the writer posts nothing after `ttl_s` from receipt, the
    owner waits a margin longer.
    """

    lease_id: str
    agent_metadata: bytes  # opaque; gives the writer's agent the owner's name, address and registered memory
    base_address: int  # first byte of the block memory in the owner's address space
    num_blocks: int  # blocks in that memory (the stride between its segments)
    contract: Contract  # must equal the writer's own
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # generation of each block when it was granted
    ttl_s: float
