"""`checksum.tensor_checksum` of many block lists of one memory in one launch. Importing it needs triton.

On an H100 it sums 2.9 TB/s (bench/gpu/README.md).
"""

from __future__ import annotations

from typing import Any, cast

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# `checksum`'s constants as signed words.
MULTIPLIER = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
STEP = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
TILE_WORDS = 1024


@triton.jit
def _mixed(words, weights):
    products = (words ^ weights) * weights
    return (products ^ ((products >> 32) & 0xFFFFFFFF)) * MULTIPLIER


@triton.jit
def sum_blocks(memory, segments, totals, blocks, IN_WORDS: tl.constexpr, TILE: tl.constexpr):
    """Grid (blocks, segments). Adds the sum of one block in one segment to its list's total.

    memory: int64 if IN_WORDS, else uint8. segments [S, 2]: elements before the segment, elements of a block.
    totals [K] int64, zero before. blocks [B, 3]: list, place in the list, block. All tables int64.
    """
    row, number = tl.program_id(0), tl.program_id(1)
    place = tl.load(blocks + 3 * row + 1)
    size = tl.load(segments + 2 * number + 1)
    first = memory + tl.load(segments + 2 * number) + tl.load(blocks + 3 * row + 2) * size
    num_words = size if IN_WORDS else (size + 7) // 8
    sums = tl.zeros([TILE], tl.int64)
    for begin in range(0, num_words, TILE):
        index = (begin + tl.arange(0, TILE)).to(tl.int64)
        if IN_WORDS:
            words = tl.load(first + index, mask=index < num_words, other=0)
        else:
            words = tl.zeros([TILE], tl.int64)
            for i in tl.static_range(8):
                byte = tl.load(first + 8 * index + i, mask=8 * index + i < size, other=0)
                words |= byte.to(tl.int64) << (8 * i)
        sums += tl.where(index < num_words, _mixed(words, ((index + 1) * MULTIPLIER) | 1), 0)
    weight = ((place + 1) * STEP + 2 * number) | 1
    tl.atomic_add(totals + tl.load(blocks + 3 * row), _mixed(tl.sum(sums, 0), weight), sem="relaxed")


def add_sums(memory: Tensor, segments: Tensor, totals: Tensor, blocks: Tensor) -> None:
    """Enqueued on the current stream; does not wait. `memory`: the buffer as int64, or as uint8."""
    # `Any`: where Triton is missing, the type checker sees a function
    cast(Any, sum_blocks)[(len(blocks), len(segments))](
        memory, segments, totals, blocks, IN_WORDS=memory.dtype.itemsize == 8, TILE=TILE_WORDS
    )
