"""Triton kernels over paged KV. Importing them needs triton. Tried in Triton's interpreter and compiled for
sm_80, sm_90 and sm_100 (Triton 3.9), never run on a GPU.

Blocks are [num_blocks, BLOCK_SIZE, KV_HEADS, width], contiguous; a flat slot is block id * BLOCK_SIZE + row.
INT8 blocks hold codes and have float16 scales [num_blocks, BLOCK_SIZE, KV_HEADS, cdiv(width, 64)], one for
each run of 64 channels; value = code * scale. `*_PAD` is a size rounded up to a power of two, because tile
shapes must be powers of two.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.kv_format import GROUP_WIDTH

SCALE_RUN = tl.constexpr(GROUP_WIDTH)  # channels that share one scale
LOG2_E = tl.constexpr(1.4426950408889634)
# 1.5 * 2**23: adding and subtracting it rounds a small float32 half to even
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _load_rows(
    blocks, scales, rows, row_mask,
    WIDTH: tl.constexpr, PAD: tl.constexpr, QUANTISED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """[len(rows), PAD] of `dtype`. rows: int64 slot * KV_HEADS + head; columns from WIDTH on are zero."""
    columns = tl.arange(0, PAD)
    mask = row_mask[:, None] & (columns < WIDTH)[None, :]
    loaded = tl.load(blocks + rows[:, None] * WIDTH + columns[None, :], mask=mask, other=0)
    if QUANTISED:
        num_runs: tl.constexpr = (WIDTH + SCALE_RUN - 1) // SCALE_RUN
        scale_offsets = rows[:, None] * num_runs + (columns // SCALE_RUN)[None, :]
        scale = tl.load(scales + scale_offsets, mask=mask, other=0.0)
        loaded = loaded.to(tl.float32) * scale.to(tl.float32)
    return loaded.to(dtype)


@triton.jit
def decode_split(
    query, key, key_scales, value, value_scales, tables, context_lens, partial_out, partial_stats,
    scaling, softcap, num_splits, table_stride,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """Attention of one new token over one share of its keys. Grid (sequences, KV heads, num_splits); a
    program holds all GROUP query heads of its KV head, so that K and V are read once. query [B, KV_HEADS *
    GROUP, K_WIDTH], contiguous. WINDOW 0: all keys. Writes partial_out [B, heads, num_splits, V_WIDTH] (not
    normalised) and partial_stats [B, heads, num_splits, 2]: the largest score times log2(e), and the sum of
    exponentials. float32."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens + seq).to(tl.int32)
    first = tl.maximum(context_len - WINDOW, 0) if WINDOW > 0 else 0
    tiles_per_split = tl.cdiv(tl.cdiv(context_len - first, TILE), num_splits)
    start = first + split * tiles_per_split * TILE
    end = tl.minimum(start + tiles_per_split * TILE, context_len)

    members = tl.arange(0, GROUP_PAD)
    heads = (seq * KV_HEADS + kv_head).to(tl.int64) * GROUP + members
    is_member = members < GROUP
    columns = tl.arange(0, K_PAD)
    query_mask = is_member[:, None] & (columns < K_WIDTH)[None, :]
    queries = tl.load(query + heads[:, None] * K_WIDTH + columns[None, :], mask=query_mask, other=0.0)

    largest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    out = tl.zeros([GROUP_PAD, V_PAD], tl.float32)
    for tile_start in range(start, end, TILE):
        positions = tile_start + tl.arange(0, TILE)
        inside = positions < end
        block = tl.load(tables + seq * table_stride + positions // BLOCK_SIZE, mask=inside, other=0).to(
            tl.int64
        )
        rows = (block * BLOCK_SIZE + positions % BLOCK_SIZE) * KV_HEADS + kv_head
        keys = _load_rows(key, key_scales, rows, inside, K_WIDTH, K_PAD, QUANTISED, queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap * tanh(scores / softcap)
        scores = tl.where(inside[None, :], scores * LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        probs = tl.exp2(scores - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        values = _load_rows(value, value_scales, rows, inside, V_WIDTH, V_PAD, QUANTISED, queries.dtype)
        out = out * correction[:, None] + tl.dot(probs.to(queries.dtype), values, input_precision="ieee")
        total = total * correction + tl.sum(probs, 1)
        largest = new_largest

    parts = heads * num_splits + split
    tl.store(partial_stats + parts * 2, largest, mask=is_member)
    tl.store(partial_stats + parts * 2 + 1, total, mask=is_member)
    out_columns = tl.arange(0, V_PAD)
    out_mask = is_member[:, None] & (out_columns < V_WIDTH)[None, :]
    tl.store(partial_out + parts[:, None] * V_WIDTH + out_columns[None, :], out, mask=out_mask)


@triton.jit
def decode_reduce(
    partial_out, partial_stats, sinks, out, num_splits,
    HEADS: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combines the shares of one head of one sequence. Grid (sequences * HEADS,). out [B, HEADS, V_WIDTH];
    sinks [HEADS]: one more logit in the denominator. A row that sees no key becomes zero."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    is_split = splits < num_splits
    parts = row * num_splits + splits
    largest = tl.load(partial_stats + parts * 2, mask=is_split, other=float("-inf"))
    totals = tl.load(partial_stats + parts * 2 + 1, mask=is_split, other=0.0)
    top = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + row % HEADS).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(largest - top)
    total = tl.sum(weights * totals, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    columns = tl.arange(0, V_PAD)
    mask = is_split[:, None] & (columns < V_WIDTH)[None, :]
    shares = tl.load(partial_out + parts[:, None] * V_WIDTH + columns[None, :], mask=mask, other=0.0)
    joined = tl.sum(shares * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * V_WIDTH + columns, joined.to(out.dtype.element_ty), mask=columns < V_WIDTH)


@triton.jit
def write_quantised(
    rows, slots, codes, scales,
    row_stride, head_stride, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
    RUNS_PAD: tl.constexpr,
):  # fmt: skip
    """Quantises one head of one new token into its slot. Grid (tokens, KV_HEADS). rows [T, KV_HEADS, WIDTH]
    with contiguous last dimension. A run of zeros gets scale 0 and codes 0."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    runs = tl.arange(0, RUNS_PAD)
    columns = runs[:, None] * SCALE_RUN + tl.arange(0, SCALE_RUN)[None, :]
    source = rows + token.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    numbers = tl.load(source + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(numbers), 1), 127.0).to(tl.float16)
    divisor = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    ratios = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], numbers.shape))
    ratios = tl.minimum(tl.maximum(ratios, -127.0), 127.0)
    code = ((ratios + ROUNDING) - ROUNDING) * tl.where(scale == 0.0, 0.0, 1.0)[:, None]
    target = slot * KV_HEADS + head
    tl.store(codes + target * WIDTH + columns, code.to(tl.int8), mask=columns < WIDTH)
    tl.store(scales + target * RUNS + runs, scale, mask=runs < RUNS)


@triton.jit
def gather_quantised(
    codes, scales, slots, out, num_tokens,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [T, KV_HEADS, WIDTH] from slots [T]. Grid (cdiv(T, TILE), KV_HEADS)."""
    tokens = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    inside = tokens < num_tokens
    rows = tl.load(slots + tokens, mask=inside, other=0).to(tl.int64) * KV_HEADS + head
    loaded = _load_rows(codes, scales, rows, inside, WIDTH, PAD, True, out.dtype.element_ty)
    columns = tl.arange(0, PAD)
    targets = (tokens * KV_HEADS + head)[:, None] * WIDTH + columns[None, :]
    tl.store(out + targets, loaded, mask=inside[:, None] & (columns < WIDTH)[None, :])
