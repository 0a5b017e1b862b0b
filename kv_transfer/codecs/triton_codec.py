"""The int8 codec on a GPU: the same bytes as `quantisation` makes, without moving rows to the host. Importing
it needs triton.

Tried in Triton's interpreter and compiled for sm_80, sm_90 and sm_100 (Triton 3.9); never run on a GPU.

A group is GROUP_TOKENS tokens in GROUP_TOKENS / BLOCK_SIZE blocks [num_blocks, BLOCK_SIZE, HEADS, WIDTH],
contiguous. `blocks` [groups, GROUP_TOKENS / BLOCK_SIZE] and `wire_blocks` [groups] are int64.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from kv_transfer.codecs import quantisation

GROUP_TOKENS = tl.constexpr(quantisation.GROUP_TOKENS)
RUN_CHANNELS = tl.constexpr(quantisation.RUN_CHANNELS)
MAX_SCALE = tl.constexpr(quantisation.MAX_SCALE)
# 1.5 * 2**23: adding and subtracting it rounds a small float32, half to even.
ROUNDING = tl.constexpr(12582912.0)
TILE_CHANNELS = 64  # per program that codes K
TILE_TOKENS = 16  # per program that codes V


@triton.jit
def _row_offsets(blocks, group, tokens, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Elements before each token's row."""
    block = tl.load(blocks + group * (GROUP_TOKENS // BLOCK_SIZE) + tokens // BLOCK_SIZE)
    return (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * ROW


@triton.jit
def _scales_of(largest):
    """The stored scales, and the factors that give codes. A group with a NaN or infinity gets NaN and 0.

    largest: int32, the bits of max|x|; as integers a NaN is above infinity.
    """
    is_finite = largest < 0x7F800000
    numbers = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True)
    scales = tl.minimum(tl.div_rn(numbers, tl.full(numbers.shape, 127.0, tl.float32)), MAX_SCALE)
    halves = tl.where(is_finite, scales.to(tl.float16), float("nan")).to(tl.float16)
    is_usable = halves > 0.0
    divisors = tl.where(is_usable, halves.to(tl.float32), 1.0)
    inverses = tl.where(is_usable, tl.div_rn(tl.full(numbers.shape, 1.0, tl.float32), divisors), 0.0)
    return halves, inverses


@triton.jit
def _magnitudes(numbers):
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes_of(numbers, inverses):
    ratios = tl.where(inverses > 0.0, numbers * inverses, 0.0)
    ratios = tl.minimum(tl.maximum(ratios, -127.0), 127.0)
    return ((ratios + ROUNDING) - ROUNDING).to(tl.int8)


@triton.jit
def _store_rows(target, numbers, mask):
    if target.dtype.element_ty == tl.float16:
        is_number = numbers == numbers
        numbers = tl.where(is_number, tl.minimum(tl.maximum(numbers, -MAX_SCALE), MAX_SCALE), numbers)
    tl.store(target, numbers.to(target.dtype.element_ty), mask=mask)


@triton.jit
def code_keys(
    rows, blocks, codes, scales, wire_blocks,
    CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ENCODES: tl.constexpr,
):  # fmt: skip
    """A scale per channel. Grid (groups, cdiv(CHANNELS, TILE)); CHANNELS = heads * width."""
    group = tl.program_id(0).to(tl.int64)
    tokens = tl.arange(0, GROUP_TOKENS)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (tokens >= 0)[:, None] & (channels < CHANNELS)[None, :]
    places = rows + _row_offsets(blocks, group, tokens, CHANNELS, BLOCK_SIZE)[:, None] + channels[None, :]
    wire_block = tl.load(wire_blocks + group)
    wire_codes = codes + (wire_block * GROUP_TOKENS + tokens)[:, None] * CHANNELS + channels[None, :]
    wire_scales = scales + wire_block * CHANNELS + channels
    if ENCODES:
        numbers = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        halves, inverses = _scales_of(tl.max(_magnitudes(numbers), 0))
        tl.store(wire_scales, halves, mask=channels < CHANNELS)
        tl.store(wire_codes, _codes_of(numbers, inverses[None, :]), mask=mask)
    else:
        halves = tl.load(wire_scales, mask=channels < CHANNELS, other=0.0)
        numbers = tl.load(wire_codes, mask=mask, other=0).to(tl.float32) * halves.to(tl.float32)[None, :]
        _store_rows(places, numbers, mask)


@triton.jit
def code_values(
    rows, blocks, codes, scales, wire_blocks,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    ENCODES: tl.constexpr,
):  # fmt: skip
    """A scale per token, head and run of RUN_CHANNELS channels. Grid (groups, GROUP_TOKENS / TILE, HEADS *
    RUNS)."""
    group = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    index = tl.program_id(2)  # of the scale in its token
    head, run = index // RUNS, index % RUNS
    in_head = run * RUN_CHANNELS + tl.arange(0, RUN_CHANNELS)
    mask = (tokens >= 0)[:, None] & (in_head < WIDTH)[None, :]
    channels = head * WIDTH + in_head
    places = (
        rows + _row_offsets(blocks, group, tokens, HEADS * WIDTH, BLOCK_SIZE)[:, None] + channels[None, :]
    )
    wire_rows = tl.load(wire_blocks + group) * GROUP_TOKENS + tokens
    wire_codes = codes + wire_rows[:, None] * (HEADS * WIDTH) + channels[None, :]
    wire_scales = scales + wire_rows * (HEADS * RUNS) + index
    if ENCODES:
        numbers = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        halves, inverses = _scales_of(tl.max(_magnitudes(numbers), 1))
        tl.store(wire_scales, halves)
        tl.store(wire_codes, _codes_of(numbers, inverses[:, None]), mask=mask)
    else:
        halves = tl.load(wire_scales)
        numbers = tl.load(wire_codes, mask=mask, other=0).to(tl.float32) * halves.to(tl.float32)[:, None]
        _store_rows(places, numbers, mask)


def code_groups(
    rows: Tensor, blocks: Tensor, codes: Tensor, scales: Tensor, wire_blocks: Tensor, is_key: bool, encodes: bool
) -> None:  # fmt: skip
    """Encodes or decodes groups of one segment, in one launch on the current stream. Does not wait.

    rows [N, block_size, H, D]; blocks [G, n] and wire_blocks [G] int64; codes and scales: segments of the
    wire.
    """
    _, block_size, heads, width = rows.shape
    if is_key:
        channels = heads * width
        grid = (len(blocks), triton.cdiv(channels, TILE_CHANNELS))
        code_keys[grid](
            rows, blocks, codes, scales, wire_blocks,
            CHANNELS=channels, BLOCK_SIZE=block_size, TILE=TILE_CHANNELS, ENCODES=encodes,
        )  # fmt: skip
        return
    runs = quantisation.num_runs(width)
    code_values[(len(blocks), quantisation.GROUP_TOKENS // TILE_TOKENS, heads * runs)](
        rows, blocks, codes, scales, wire_blocks,
        HEADS=heads, WIDTH=width, RUNS=runs, BLOCK_SIZE=block_size, TILE=TILE_TOKENS, ENCODES=encodes,
    )  # fmt: skip
