"""The codecs on a GPU: the same bytes as `quantisation` makes, for all groups, layers, K and V in one launch.
Importing it needs triton.

On an H100 the kernel codes 1.35 TB of KV a second (bench/gpu/README.md); with a launch for each segment it was
24 GB/s.

A program codes a tile: the tokens of one group, up to RUN_CHANNELS channels of its K or V. K is one run of
all its channels; V has runs in each head. `SegmentTable` holds what differs between segments.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.kvcache.memory import BlockMemory
from kv_transfer.codecs import quantisation
from kv_transfer.codecs.pending import upload

RUN_CHANNELS = tl.constexpr(quantisation.RUN_CHANNELS)
HALF_TOKENS = tl.constexpr(quantisation.GROUP_TOKENS // 2)  # an int4 byte holds tokens t and t + HALF_TOKENS
MAX_SCALE = tl.constexpr(quantisation.MAX_SCALE)
# 1.5 * 2**23: adding and subtracting it rounds a small float32, half to even.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _scales_of(largest, MAX_CODE: tl.constexpr):
    """The stored scales, and the factors that give codes. A group with a NaN or infinity gets NaN and 0.

    largest: int32, the bits of max|x|; as integers a NaN is above infinity.
    """
    is_finite = largest < 0x7F800000
    numbers = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True)
    scales = tl.minimum(tl.div_rn(numbers, tl.full(numbers.shape, MAX_CODE, tl.float32)), MAX_SCALE)
    halves = tl.where(is_finite, scales.to(tl.float16), float("nan")).to(tl.float16)
    is_usable = halves > 0.0
    divisors = tl.where(is_usable, halves.to(tl.float32), 1.0)
    inverses = tl.where(is_usable, tl.div_rn(tl.full(numbers.shape, 1.0, tl.float32), divisors), 0.0)
    return halves, inverses


@triton.jit
def _magnitudes(numbers):
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes_of(numbers, inverses, MAX_CODE: tl.constexpr):
    """int32."""
    ratios = tl.where(inverses > 0.0, numbers * inverses, 0.0)
    ratios = tl.minimum(tl.maximum(ratios, -MAX_CODE), MAX_CODE)
    return ((ratios + ROUNDING) - ROUNDING).to(tl.int32)


@triton.jit
def _store_codes(codes, low, high, row_elements, mask, BITS: tl.constexpr):
    if BITS == 8:
        tl.store(codes, low.to(tl.int8), mask=mask)
        tl.store(codes + HALF_TOKENS * row_elements, high.to(tl.int8), mask=mask)
    else:
        tl.store(codes, ((low & 15) | ((high & 15) << 4)).to(tl.int8), mask=mask)


@triton.jit
def _load_codes(codes, row_elements, mask, BITS: tl.constexpr):
    """float32, of both halves of the group."""
    low = tl.load(codes, mask=mask, other=0).to(tl.int32)
    if BITS == 8:
        high = tl.load(codes + HALF_TOKENS * row_elements, mask=mask, other=0).to(tl.int32)
    else:
        high = low >> 4
        low = (low << 28) >> 28
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _store_rows(target, numbers, mask):
    if target.dtype.element_ty == tl.float16:
        is_number = numbers == numbers
        numbers = tl.where(is_number, tl.minimum(tl.maximum(numbers, -MAX_SCALE), MAX_SCALE), numbers)
    tl.store(target, numbers.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _code_keys(low, high, codes, scales, row_elements, mask, channel_mask, BITS: tl.constexpr,
               MAX_CODE: tl.constexpr, ENCODES: tl.constexpr):  # fmt: skip
    """low, high: places of the tile's rows, [HALF_TOKENS, RUN_CHANNELS]. scales: places, one a channel."""
    if ENCODES:
        first = tl.load(low, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(high, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(_magnitudes(first), 0), tl.max(_magnitudes(second), 0))
        halves, inverses = _scales_of(largest, MAX_CODE)
        tl.store(scales, halves, mask=channel_mask)
        first = _codes_of(first, inverses[None, :], MAX_CODE)
        second = _codes_of(second, inverses[None, :], MAX_CODE)
        _store_codes(codes, first, second, row_elements, mask, BITS)
    else:
        halves = tl.load(scales, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
        first, second = _load_codes(codes, row_elements, mask, BITS)
        _store_rows(low, first * halves, mask)
        _store_rows(high, second * halves, mask)


@triton.jit
def _code_values(low, high, codes, scales, scale_stride, row_elements, mask, BITS: tl.constexpr,
                 MAX_CODE: tl.constexpr, ENCODES: tl.constexpr):  # fmt: skip
    """Likewise; scales: places, one a token of the first half. scale_stride: scales of a token."""
    if ENCODES:
        first = tl.load(low, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(high, mask=mask, other=0.0).to(tl.float32)
        halves, inverses = _scales_of(tl.max(_magnitudes(first), 1), MAX_CODE)
        tl.store(scales, halves)
        first = _codes_of(first, inverses[:, None], MAX_CODE)
        halves, inverses = _scales_of(tl.max(_magnitudes(second), 1), MAX_CODE)
        tl.store(scales + HALF_TOKENS * scale_stride, halves)
        second = _codes_of(second, inverses[:, None], MAX_CODE)
        _store_codes(codes, first, second, row_elements, mask, BITS)
    else:
        first, second = _load_codes(codes, row_elements, mask, BITS)
        halves = tl.load(scales).to(tl.float32)[:, None]
        _store_rows(low, first * halves, mask)
        halves = tl.load(scales + HALF_TOKENS * scale_stride).to(tl.float32)[:, None]
        _store_rows(high, second * halves, mask)


@triton.jit
def code_groups(
    kv, codes, scales, segments, jobs,
    NUM_TILES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BITS: tl.constexpr, ALIGNMENT: tl.constexpr,
    ENCODES: tl.constexpr,
):  # fmt: skip
    """Grid (J * 2 * NUM_TILES). kv, codes, scales: the buffers of KV and wire in elements of KV, bytes and
    float16. segments [2 * layers, 6] int64: `SegmentTable`. jobs [J, 2 + 64 / BLOCK_SIZE] int32: layer, wire
    block, KV blocks of a group. ALIGNMENT divides all starts and widths, so that rows move in vectors."""
    BLOCKS: tl.constexpr = 2 * HALF_TOKENS // BLOCK_SIZE
    MAX_CODE: tl.constexpr = 127.0 if BITS == 8 else 7.0
    tile = tl.program_id(0) % NUM_TILES
    job = jobs + (tl.program_id(0) // (2 * NUM_TILES)).to(tl.int64) * (2 + BLOCKS)
    is_value = tl.program_id(0) // NUM_TILES % 2
    segment = segments + (2 * tl.load(job) + is_value) * 6
    heads, runs = tl.load(segment + 3), tl.load(segment + 5)
    width = tl.multiple_of(tl.load(segment + 4), ALIGNMENT)
    if tile < heads * runs:
        wire_block = tl.load(job + 1).to(tl.int64)
        row_elements = tl.multiple_of(heads * width, ALIGNMENT)
        tokens = tl.arange(0, HALF_TOKENS)
        in_head = tile % runs * RUN_CHANNELS + tl.arange(0, RUN_CHANNELS)
        channels = tile // runs * width + in_head
        mask = (tokens >= 0)[:, None] & (in_head < width)[None, :]
        rows = kv + tl.multiple_of(tl.load(segment), ALIGNMENT) + channels[None, :]
        blocks = tl.load(job + 2 + tokens // BLOCK_SIZE).to(tl.int64)
        low = rows + ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * row_elements)[:, None]
        blocks = tl.load(job + 2 + (tokens + HALF_TOKENS) // BLOCK_SIZE).to(tl.int64)
        high = rows + ((blocks * BLOCK_SIZE + (tokens + HALF_TOKENS) % BLOCK_SIZE) * row_elements)[:, None]
        wire_rows = wire_block * (HALF_TOKENS * BITS // 4) + tokens
        first_code = tl.multiple_of(tl.load(segment + 1), ALIGNMENT)
        code_places = codes + first_code + wire_rows[:, None] * row_elements + channels[None, :]
        segment_scales = scales + tl.load(segment + 2)
        if is_value:
            stride = heads * runs
            value_scales = segment_scales + (wire_block * 2 * HALF_TOKENS + tokens) * stride + tile
            _code_values(
                low, high, code_places, value_scales, stride, row_elements, mask, BITS, MAX_CODE, ENCODES
            )  # fmt: skip
        else:
            key_scales = segment_scales + wire_block * row_elements + channels
            in_row = in_head < width
            _code_keys(
                low, high, code_places, key_scales, row_elements, mask, in_row, BITS, MAX_CODE, ENCODES
            )  # fmt: skip


class SegmentTable:
    """Where the segments of a KV memory and its wire memory lie and how they are cut into tiles; made once,
    on the device."""

    def __init__(self, kv: BlockMemory, wire: BlockMemory, planes: np.ndarray, bits: int):
        """planes: `Codec._plane_table`."""
        starts, heads, width, run = planes[..., :3].copy(), planes[..., 3], planes[..., 4], planes[..., 5]
        itemsize = kv.segments[0].dtype.itemsize
        starts *= [kv.num_blocks, wire.num_blocks, wire.num_blocks]
        starts //= [itemsize, 1, 2]
        is_key = run == 0
        heads, width = np.where(is_key, 1, heads), np.where(is_key, heads * width, width)
        runs = -(-width // quantisation.RUN_CHANNELS)
        table = np.concatenate([starts, np.stack([heads, width, runs], -1)], -1).reshape(-1, 6)
        self._segments = upload(table, kv.buffer.device)
        self._alignment = int(np.gcd.reduce([*starts.flat, *width.flat, 16]))
        self._num_tiles = int((heads * runs).max())
        self._block_size, self._bits = kv.segments[0].shape[1], bits
        self._kv = kv.buffer.view(kv.segments[0].dtype)
        self._codes, self._scales = wire.buffer.view(torch.int8), wire.buffer.view(torch.float16)

    def code(self, jobs: np.ndarray, *, encodes: bool) -> None:
        """Encodes or decodes. jobs: as in `code_groups`. Enqueued on the current stream; does not wait."""
        # `Any`: where Triton is missing, the type checker sees a function
        cast(Any, code_groups)[(len(jobs) * 2 * self._num_tiles,)](
            self._kv, self._codes, self._scales, self._segments, upload(jobs, self._kv.device),
            NUM_TILES=self._num_tiles, BLOCK_SIZE=self._block_size, BITS=self._bits,
            ALIGNMENT=self._alignment, ENCODES=encodes,
        )  # fmt: skip
