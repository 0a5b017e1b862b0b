"""Triton kernels of attention over packed segments: rows of images, windows, frames or pieces of sound that
lie one after the other, of which each sees its own segment and all of it. Importing them needs triton;
`packed_attention` launches them.

`cut_segments` cuts the segments into tiles of rows, and `attend_segments` computes one tile of one head in a
program. Tiles of rows and of keys begin where the segment begins, so a row's bits depend on its segment
alone, in any company.

A head's channels are worked on in a run of RUN and, if that is not all, one of REST; both are powers of two,
so that heads of 72 or 80 channels cost 80 and not 128. float32 products are exact ones (`ieee`); in 16 bits,
scores and sums are float32, and probabilities are rounded before they meet the values.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOG2_E = tl.constexpr(1.4426950408889634)
TILE_WIDTH = tl.constexpr(4)  # numbers of a tile's record


@triton.jit(do_not_specialize=["num_segments", "capacity"])
def cut_segments(
    starts, tiles, num_segments, capacity,
    ROWS: tl.constexpr, TILES: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(capacity, TILES),): a program finds TILES tiles of ROWS rows. Each counts the tiles of all
    segments again, so none waits for another.

    starts [num_segments + 1], any integers: exclusive prefix sums. tiles [capacity, TILE_WIDTH] int32: first
    row, first row of its segment, end of its segment, number of its segment; the first three are zeros for
    tiles that there are not."""
    numbers = tl.program_id(0) * TILES + tl.arange(0, TILES)
    segment = tl.zeros([TILES], tl.int32)  # of each tile
    first_tile = tl.zeros([TILES], tl.int32)  # of that segment
    num_tiles = 0
    for first in range(0, num_segments, SEGMENTS):
        segments = first + tl.arange(0, SEGMENTS)
        valid = segments < num_segments
        start = tl.load(starts + segments, mask=valid, other=0).to(tl.int32)
        end = tl.load(starts + segments + 1, mask=valid, other=0).to(tl.int32)
        own_tiles = (end - start + ROWS - 1) // ROWS
        tile_ends = num_tiles + tl.cumsum(own_tiles, 0)
        is_before = (tile_ends[None, :] <= numbers[:, None]) & valid[None, :]
        segment += tl.sum(is_before.to(tl.int32), 1)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(is_before, tile_ends[None, :], 0), 1))
        num_tiles += tl.sum(own_tiles, 0)
    is_tile = numbers < num_tiles
    start = tl.load(starts + segment, mask=is_tile, other=0).to(tl.int32)
    end = tl.load(starts + segment + 1, mask=is_tile, other=0).to(tl.int32)
    row = tl.where(is_tile, start + (numbers - first_tile) * ROWS, 0)
    inside = numbers < capacity
    record = tiles + numbers * TILE_WIDTH
    tl.store(record, row, mask=inside)
    tl.store(record + 1, start, mask=inside)
    tl.store(record + 2, end, mask=inside)
    tl.store(record + 3, segment, mask=inside)


@triton.jit
def _load(contents, rows, row_mask, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """[len(rows), RUN]: channels from FIRST on; those from WIDTH on are zero."""
    columns = FIRST + tl.arange(0, RUN)
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(contents + offsets, mask=row_mask[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(
    target, rows, row_mask, numbers, FIRST: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    columns = FIRST + tl.arange(0, RUN)
    offsets = rows.to(tl.int64)[:, None] * (tl.num_programs(1) * WIDTH) + columns[None, :]
    mask = row_mask[:, None] & (columns < WIDTH)[None, :]
    tl.store(target + offsets, numbers.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["query_head_stride", "key_head_stride", "value_head_stride"])
def attend_segments(
    query, key, value, out, tiles, scaling, query_stride, key_stride, value_stride,
    query_head_stride, key_head_stride, value_head_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, query heads). query, key, value: any tensors whose channels lie side by side; strides of
    rows and heads in elements. Those of heads may follow from T; ALIGNMENT divides them. GROUP query heads
    share a KV head. out [T, query heads, WIDTH], contiguous."""
    head = tl.program_id(1)
    record = tiles + tl.program_id(0) * TILE_WIDTH
    first_row, start, end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    query += tl.multiple_of(head * query_head_stride, ALIGNMENT)
    key += tl.multiple_of(head // GROUP * key_head_stride, ALIGNMENT)
    value += tl.multiple_of(head // GROUP * value_head_stride, ALIGNMENT)
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    query0 = _load(query, rows, is_row, query_stride, 0, WIDTH, RUN)
    out0 = tl.zeros([ROWS, RUN], tl.float32)
    if REST > 0:
        query1 = _load(query, rows, is_row, query_stride, RUN, WIDTH, REST)
        out1 = tl.zeros([ROWS, REST], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first_key in range(start, end, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        inside = keys < end
        key0 = _load(key, keys, inside, key_stride, 0, WIDTH, RUN)
        scores = tl.dot(query0, tl.trans(key0), input_precision="ieee")
        if REST > 0:
            key1 = _load(key, keys, inside, key_stride, RUN, WIDTH, REST)
            scores = tl.dot(query1, tl.trans(key1), scores, input_precision="ieee")
        scores *= scaling * LOG2_E
        if first_key + KEYS > end:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        probs = tl.exp2(scores - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(probs, 1)
        largest = new_largest
        probs = probs.to(value.dtype.element_ty)
        value0 = _load(value, keys, inside, value_stride, 0, WIDTH, RUN)
        out0 = tl.dot(probs, value0, out0 * correction[:, None], input_precision="ieee")
        if REST > 0:
            value1 = _load(value, keys, inside, value_stride, RUN, WIDTH, REST)
            out1 = tl.dot(probs, value1, out1 * correction[:, None], input_precision="ieee")
    divisor = tl.where(is_row, total, 1.0)[:, None]
    out += head * WIDTH
    _store(out, rows, is_row, out0 / divisor, 0, WIDTH, RUN)
    if REST > 0:
        _store(out, rows, is_row, out1 / divisor, RUN, WIDTH, REST)
