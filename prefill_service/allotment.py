"""KV blocks for a prompt: the cached prefix, and room for the rest."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.chunks import Span, usable_prefix
from prefill_service.state import PromptSequence


def try_allocate_blocks(blocks: BlockPool, sequence: PromptSequence, spans: tuple[Span, ...]) -> bool:
    """Allocates blocks for all of the prompt; the blocks of its cached prefix are shared. False, and no
    change, if there are too few. `spans` are computed in one piece."""
    block_size = blocks.block_size
    cached = sequence.block_table = blocks.lookup(sequence.block_hashes)
    usable = usable_prefix(len(cached) * block_size, sequence.num_tokens, block_size, spans)
    num_cached_blocks = usable // block_size
    sequence.block_table = cached[:num_cached_blocks]
    blocks.free(cached[num_cached_blocks:])
    fresh = blocks.try_allocate(-(-sequence.num_tokens // block_size) - num_cached_blocks)
    if fresh is None:
        blocks.free(sequence.block_table)
        sequence.block_table = []
        return False
    sequence.block_table += fresh
    sequence.num_cached_tokens = sequence.num_computed_tokens = usable
    return True


def free_blocks(blocks: BlockPool, sequences: Iterable[PromptSequence]) -> None:
    """Frees the blocks of prompts that go on waiting."""
    for sequence in sequences:
        blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_cached_tokens = sequence.num_computed_tokens = 0
