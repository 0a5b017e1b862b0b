"""The prefix cache of hybrid models: states after some tokens of a prompt, in blocks that requests share.

A prompt can go on from cached tokens only where both are known: their KV, and the state after the last of
them. A snapshot is that state, at the end of a full block, under names that follow from the block's hash. Two
are taken of a prompt, if the pool has room for them:

* at its last full block, for a prompt that repeats or continues it;
* where its KV was known further than its states, for prompts that share the beginning alone.

The step writes a snapshot where it passes it, so it costs no copy; the next tokens go on from it. Functions
of the engine's thread over the records of a sequence and the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.engine.sequence import TokenSequence
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import snapshot_key, snapshot_names
from cluster.scheduling.chunks import Span, usable_prefix


def last_known(hashes: Sequence[bytes], blocks: BlockPool, state_blocks: int) -> int:
    """How many of these blocks end at the last snapshot that is known; 0: there is none. Changes nothing."""
    for num_blocks in range(len(hashes), 0, -1):
        block_hash = hashes[num_blocks - 1]
        if not blocks.num_known([snapshot_key(block_hash)]):  # a state has many blocks
            continue
        if blocks.num_known(snapshot_names(block_hash, state_blocks)) == state_blocks:
            return num_blocks
    return 0


def share_snapshot(
    sequence: TokenSequence,
    cached: Sequence[int],
    blocks: BlockPool,
    uncut: tuple[Span, ...],
    state_blocks: int,
) -> int:
    """Lets the sequence begin behind the last usable snapshot. cached: blocks of its KV that are known.
    Returns how many of them it has; the caller frees the others."""
    if sequence.hashes is None:
        return 0
    size, hashes, num_blocks = blocks.block_size, sequence.hashes.hashes, len(cached)
    while num_blocks:
        usable = usable_prefix(num_blocks * size, sequence.num_prompt_tokens, size, uncut) // size
        num_blocks = last_known(hashes[:usable], blocks, state_blocks)
        if num_blocks == usable:
            break
    if num_blocks:
        sequence.share_state(blocks.lookup(snapshot_names(hashes[num_blocks - 1], state_blocks)))
    sequence.share([*cached[:num_blocks]], num_blocks * size)
    return num_blocks


def plan_snapshots(
    sequence: TokenSequence, num_known: int, blocks: BlockPool, uncut: tuple[Span, ...], state_blocks: int,
    num_spare: int,
) -> None:  # fmt: skip
    """Allocates blocks for snapshots of the prompt, while more than `num_spare` are left. num_known: blocks
    of its KV that were known."""
    if sequence.hashes is None:
        return
    size, length = blocks.block_size, sequence.num_prompt_tokens
    for num_tokens in (length, num_known * size):
        at = usable_prefix(num_tokens, length, size, uncut)
        if at <= sequence.num_cached_tokens or at in sequence.snapshots:
            continue
        if state_blocks + num_spare <= blocks.num_free:
            sequence.plan_snapshot(at, blocks.allocate(state_blocks))


def register_snapshots(sequence: TokenSequence, blocks: BlockPool) -> None:
    """Makes those findable that the last step has written, and lets go of the one that it began with."""
    if sequence.hashes is None:
        return
    began_with = sequence.share_state([])
    for num_tokens, block_ids in sequence.take_snapshots().items():
        block_hash = sequence.hashes.hashes[num_tokens // blocks.block_size - 1]
        for block_id, name in zip(block_ids, snapshot_names(block_hash, len(block_ids)), strict=True):
            blocks.register(block_id, name)
        if num_tokens == sequence.num_computed_tokens:
            sequence.share_state(block_ids)
        else:
            blocks.free(block_ids)
    blocks.free(began_with)
