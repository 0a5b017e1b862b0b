"""A block memory whose last elements no int32 counts, as those of an 80 GB card are: addresses alone, as
pages are allocated when they are first written."""

from __future__ import annotations

import pytest

from cluster.kvcache.memory import BlockMemory, MemoryLayout

NUM_ELEMENTS = 1 << 31


def far_memory(layout: MemoryLayout, *, as_a_whole: bool = False) -> BlockMemory:
    """The largest segments have so many elements, or all of them together. Skips the test where there are no
    such addresses."""
    sizes = [(segment.block_bytes, segment.dtype.itemsize) for segment in layout.segments]
    block_bytes, itemsize = max(sizes)
    block_bytes = layout.block_bytes if as_a_whole else block_bytes
    try:
        return BlockMemory(layout, NUM_ELEMENTS * itemsize // block_bytes + 1024)
    except OSError as error:
        pytest.skip(f"no memory of {NUM_ELEMENTS} elements: {error}")


def far_ids(memory: BlockMemory, num_blocks: int) -> range:
    """The last blocks."""
    return range(memory.num_blocks - num_blocks, memory.num_blocks)
