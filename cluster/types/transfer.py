"""The right to write into another process's memory. Grants are made by the owner of the memory and travel over the
side channel only; none is ever accepted from a client."""

from __future__ import annotations

import msgspec


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
    layout: str  # fingerprint of the memory's layout; must equal the writer's own
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # generation of each block when it was granted
    ttl_s: float
