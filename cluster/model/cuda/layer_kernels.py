"""Triton kernels of a decoder layer, of what lies between its matrix products. Importing them needs triton;
`layer_calls` launches them and says what they compute.

Each kernel reads the last product as SHARES partial results [SHARES, T, width], sums them in order in float32
and rounds the sum to the model's dtype: a product that is cut along its inner dimension needs no launch of
its own for the sum. Sums are float32, and a value is rounded to the model's dtype where transformers' modules
round it. A row's result depends on that row alone. `write_rows` serves modules that are not fused. `*_PAD` is
a size rounded up to a power of two.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import begin, let_next_begin, wait_for_last
from cluster.model.kv_format import GROUP_WIDTH, MAX_CODE

SCALE_RUN = tl.constexpr(GROUP_WIDTH)  # channels that share one scale
LARGEST_CODE = tl.constexpr(float(MAX_CODE))
# 1.5 * 2**23: adding and subtracting it rounds a small float32 half to even
ROUNDING = tl.constexpr(12582912.0)
ROUNDED, FLOAT, PLUS_ONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # `NormForm`
HALVES, PAIRS = tl.constexpr(0), tl.constexpr(1)  # `Rotation`
FULL, HALF, PAIRED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # `Table`
SILU, GELU, GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # `ActivationKind`


@triton.jit
def rounded(numbers, dtype: tl.constexpr):
    """numbers float32, rounded to `dtype`, as float32."""
    return numbers.to(dtype).to(tl.float32)


@triton.jit
def _summed(shares, offsets, mask, share_stride, SHARES: tl.constexpr, dtype: tl.constexpr):
    """The product's elements at `offsets` in float32, rounded to `dtype`."""
    total = tl.load(shares + offsets, mask=mask, other=0.0).to(tl.float32)
    for share in range(1, SHARES):
        total += tl.load(shares + share * share_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return rounded(total, dtype)


@triton.jit
def total(
    shares, out, share_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, cdiv(WIDTH, TILE))."""
    begin(EARLY)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < WIDTH
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + columns
    dtype: tl.constexpr = out.dtype.element_ty
    added = _summed(shares, offsets, mask, share_stride, SHARES, dtype)
    tl.store(out + offsets, added.to(dtype), mask=mask)


@triton.jit
def factors_of(weight, columns, mask):
    """A norm's weight in float32, loaded before the sum that the norm waits for; None without a weight."""
    factors = weight
    if weight is not None:
        factors = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    return factors


@triton.jit
def weighted(scaled, factors, FORM: tl.constexpr, dtype: tl.constexpr):
    """An RMSNorm after its division by the root mean square. Returns float32, rounded to `dtype`."""
    if factors is not None:
        if FORM == ROUNDED:
            scaled = factors * rounded(scaled, dtype)
        elif FORM == PLUS_ONE:
            scaled = scaled * (1.0 + factors)
        else:
            scaled = factors * scaled
    return rounded(scaled, dtype)


@triton.jit
def add_norm(
    residual, shares, out, post_weight, pre_weight,
    share_stride, scale, post_epsilon, pre_epsilon,
    WIDTH: tl.constexpr, PAD: tl.constexpr, SHARES: tl.constexpr, HAS_POST: tl.constexpr,
    POST_FORM: tl.constexpr, HAS_PRE: tl.constexpr, PRE_FORM: tl.constexpr, HAS_SCALE: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T,): one row a program. SHARES 0: the residual is only read. Weights are read before the wait."""
    let_next_begin(EARLY)
    columns = tl.arange(0, PAD)
    mask = columns < WIDTH
    post_factors = factors_of(post_weight, columns, mask)
    pre_factors = factors_of(pre_weight, columns, mask)
    wait_for_last(EARLY)
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + columns
    dtype: tl.constexpr = residual.dtype.element_ty
    total = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if SHARES > 0:
        added = _summed(shares, offsets, mask, share_stride, SHARES, dtype)
        if HAS_POST:
            scaled = added * tl.rsqrt(tl.sum(added * added, 0) / WIDTH + post_epsilon)
            added = weighted(scaled, post_factors, POST_FORM, dtype)
        if HAS_SCALE:
            added = rounded(added * scale, dtype)
        total = rounded(total + added, dtype)
        tl.store(residual + offsets, total.to(dtype), mask=mask)
    if HAS_PRE:
        scaled = total * tl.rsqrt(tl.sum(total * total, 0) / WIDTH + pre_epsilon)
        normed = weighted(scaled, pre_factors, PRE_FORM, dtype)
        tl.store(out + offsets, normed.to(dtype), mask=mask)


@triton.jit
def _rotated(
    shares, cos, sin, weight, heads, num_heads, share_stride, epsilon,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, SHARES: tl.constexpr, ROTARY: tl.constexpr,
    ROTATION: tl.constexpr, TABLE: tl.constexpr, NORM_BEFORE: tl.constexpr, NORM_AFTER: tl.constexpr,
    FORM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Norm and rotary embedding of some heads of one token, whose first head `shares` points to; they are
    STEP columns apart. Returns [len(heads), PAD] float32, rounded to `dtype`; columns from WIDTH on are
    zero."""
    columns = tl.arange(0, PAD)
    mask = (heads < num_heads)[:, None] & (columns < WIDTH)[None, :]
    offsets = heads[:, None] * STEP + columns[None, :]
    own = _summed(shares, offsets, mask, share_stride, SHARES, dtype)
    factors = factors_of(weight, columns[None, :], mask)
    if ROTARY > 0:  # nothing that is loaded here waits for a norm
        half: tl.constexpr = ROTARY // 2
        rotates = columns < ROTARY
        if ROTATION == HALVES:
            partners = tl.where(columns < half, columns + half, columns - half)
            signs = tl.where(columns < half, -1.0, 1.0)
        else:
            partners = columns ^ 1
            signs = tl.where(columns % 2 == 0, -1.0, 1.0)
        partners = tl.where(rotates, partners, columns)
        offsets = heads[:, None] * STEP + partners[None, :]
        other = _summed(shares, offsets, mask, share_stride, SHARES, dtype)
        if NORM_BEFORE:
            other_factors = factors_of(weight, partners[None, :], mask)
        angles = columns % half if TABLE == HALF else columns // 2 if TABLE == PAIRED else columns
        angles, turns = tl.broadcast_to(angles[None, :], mask.shape), mask & rotates[None, :]
        cosines = tl.load(cos + angles, mask=turns, other=1.0).to(tl.float32)  # for every head: no exchange
        sines = tl.load(sin + angles, mask=turns, other=0.0).to(tl.float32)
    if NORM_BEFORE:
        inverse = tl.rsqrt(tl.sum(own * own, 1) / WIDTH + epsilon)[:, None]
        own = weighted(own * inverse, factors, FORM, dtype)
    if ROTARY > 0:
        if NORM_BEFORE:
            other = weighted(other * inverse, other_factors, FORM, dtype)
        own = tl.where(rotates[None, :], own * cosines + (other * signs[None, :]) * sines, own)
        own = rounded(own, dtype)
    if NORM_AFTER:
        inverse = tl.rsqrt(tl.sum(own * own, 1) / WIDTH + epsilon)[:, None]
        own = weighted(own * inverse, factors, FORM, dtype)
    return tl.where(mask, own, 0.0)


@triton.jit
def _heads_of(
    shares, heads, num_heads, share_stride,
    WIDTH: tl.constexpr, PAD: tl.constexpr, SHARES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """As `_rotated` returns them, but neither normed nor rotated."""
    columns = tl.arange(0, PAD)
    mask = (heads < num_heads)[:, None] & (columns < WIDTH)[None, :]
    return _summed(shares, heads[:, None] * WIDTH + columns[None, :], mask, share_stride, SHARES, dtype)


@triton.jit
def _write(
    rows, store, scales, slot, heads,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """rows [HEADS, PAD] float32, rounded to the model's dtype and zero from WIDTH on, to one slot. Codes and
    scales are those of `kv_format.quantise`."""
    columns = tl.arange(0, PAD)
    is_head = heads < NUM_HEADS
    mask = is_head[:, None] & (columns < WIDTH)[None, :]
    targets = slot * NUM_HEADS + heads
    if scales is not None:
        run: tl.constexpr = SCALE_RUN if PAD > SCALE_RUN else PAD
        runs: tl.constexpr = PAD // run
        num_runs: tl.constexpr = (WIDTH + SCALE_RUN - 1) // SCALE_RUN
        grouped = tl.reshape(rows, [HEADS, runs, run])
        scale = tl.div_rn(tl.max(tl.abs(grouped), 2), LARGEST_CODE).to(tl.float16)
        divisors = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))[:, :, None]
        ratios = tl.div_rn(grouped, tl.broadcast_to(divisors, grouped.shape))
        ratios = tl.minimum(tl.maximum((ratios + ROUNDING) - ROUNDING, -LARGEST_CODE), LARGEST_CODE)
        rows = tl.reshape(tl.where(scale[:, :, None] == 0.0, 0.0, ratios), [HEADS, PAD])
        numbers = tl.arange(0, runs)
        scale_mask = is_head[:, None] & (numbers < num_runs)[None, :]
        tl.store(scales + targets[:, None] * num_runs + numbers[None, :], scale, mask=scale_mask)
    tl.store(store + targets[:, None] * WIDTH + columns[None, :], rows.to(store.dtype.element_ty), mask=mask)


@triton.jit
def _copy(
    source, store, scales, slot, heads, head_stride,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PAD)
    mask = (heads < NUM_HEADS)[:, None] & (columns < WIDTH)[None, :]
    offsets = heads[:, None].to(tl.int64) * head_stride + columns[None, :]
    rows = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    _write(rows, store, scales, slot, heads, NUM_HEADS, WIDTH, PAD, HEADS)


@triton.jit
def rope_write(
    shares, cos, sin, slots, query_weight, key_weight, query, key, key_scales, value, value_scales,
    share_stride, table_stride, query_epsilon, key_epsilon,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr,
    V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, SHARES: tl.constexpr, HEADS: tl.constexpr,
    ROTARY: tl.constexpr, ROTATION: tl.constexpr, TABLE: tl.constexpr, NORM_BEFORE: tl.constexpr,
    NORM_AFTER: tl.constexpr, FORM: tl.constexpr, QUERY_STEP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, tiles): HEADS heads of one token a program; first tiles of q, then of k, then of v. HEADS is a
    constant of the model: it decides how a norm's sum is cut among threads. QUERY_STEP: columns from one head
    of q to the next."""
    wait_for_last(EARLY)  # attention's programs begin when these have left room for all of them
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    row_width: tl.constexpr = QUERY_HEADS * QUERY_STEP + KV_HEADS * (K_WIDTH + V_WIDTH)
    dtype: tl.constexpr = query.dtype.element_ty
    shares += token * row_width
    cos += token * table_stride
    sin += token * table_stride
    members, slot = tl.arange(0, HEADS), tl.load(slots + token).to(tl.int64)
    if tile < query_tiles:
        heads = tile * HEADS + members
        queries = _rotated(
            shares, cos, sin, query_weight, heads, QUERY_HEADS, share_stride, query_epsilon,
            QUERY_STEP, K_WIDTH, K_PAD, SHARES, ROTARY, ROTATION, TABLE, NORM_BEFORE, NORM_AFTER, FORM, dtype,
        )  # fmt: skip
        _write(queries, query, None, token, heads, QUERY_HEADS, K_WIDTH, K_PAD, HEADS)
    elif tile < query_tiles + kv_tiles:
        heads = (tile - query_tiles) * HEADS + members
        keys = _rotated(
            shares + QUERY_HEADS * QUERY_STEP, cos, sin, key_weight, heads, KV_HEADS, share_stride,
            key_epsilon, K_WIDTH, K_WIDTH, K_PAD, SHARES, ROTARY, ROTATION, TABLE, NORM_BEFORE, NORM_AFTER,
            FORM, dtype,
        )  # fmt: skip
        _write(keys, key, key_scales, slot, heads, KV_HEADS, K_WIDTH, K_PAD, HEADS)
    else:
        heads = (tile - query_tiles - kv_tiles) * HEADS + members
        values = _heads_of(
            shares + QUERY_HEADS * QUERY_STEP + KV_HEADS * K_WIDTH, heads, KV_HEADS, share_stride,
            V_WIDTH, V_PAD, SHARES, dtype,
        )  # fmt: skip
        _write(values, value, value_scales, slot, heads, KV_HEADS, V_WIDTH, V_PAD, HEADS)


@triton.jit
def write_rows(
    key_rows, value_rows, slots, key, key_scales, value, value_scales,
    key_stride, key_head_stride, value_stride, value_head_stride,
    KV_HEADS: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_WIDTH: tl.constexpr,
    V_PAD: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, tiles): HEADS heads of one token a program; first tiles of k, then of v. Rows have contiguous
    columns."""
    wait_for_last(EARLY)  # as `rope_write`
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    slot = tl.load(slots + token).to(tl.int64)
    members = tl.arange(0, HEADS)
    if tile < tiles:
        heads = tile * HEADS + members
        _copy(
            key_rows + token * key_stride, key, key_scales, slot, heads, key_head_stride,
            KV_HEADS, K_WIDTH, K_PAD, HEADS,
        )  # fmt: skip
    else:
        heads = (tile - tiles) * HEADS + members
        _copy(
            value_rows + token * value_stride, value, value_scales, slot, heads, value_head_stride,
            KV_HEADS, V_WIDTH, V_PAD, HEADS,
        )  # fmt: skip


@triton.jit
def acted(x, alpha, KIND: tl.constexpr):
    """x float32 → the same."""
    if KIND == SILU:
        out = x * tl.sigmoid(alpha * x)
    elif KIND == GELU:
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # 0.5 * (1 + tanh(x)) is sigmoid(2 * x)
        out = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return out


@triton.jit
def gate(
    shares, out, share_stride, limit, alpha, offset,
    WIDTH: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, cdiv(WIDTH, TILE))."""
    begin(EARLY)
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < WIDTH
    offsets = token * (2 * WIDTH) + columns
    gates = _summed(shares, offsets, mask, share_stride, SHARES, dtype)
    ups = _summed(shares, offsets + WIDTH, mask, share_stride, SHARES, dtype)
    if HAS_LIMIT:
        gates = rounded(tl.minimum(gates, limit), dtype)
        ups = rounded(tl.minimum(tl.maximum(ups, -limit), limit), dtype)
    product = rounded(acted(gates, alpha, KIND), dtype) * rounded(ups + offset, dtype)
    tl.store(out + token * WIDTH + columns, product.to(dtype), mask=mask)


@triton.jit
def gate_heads(
    shares, x, out, share_stride, row_width, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SHARES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, cdiv(HEADS * WIDTH, TILE)). x, out [T, HEADS, WIDTH]. A head's gate follows its q in
    shares."""
    begin(EARLY)
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < HEADS * WIDTH
    offsets = token * row_width + columns // WIDTH * (2 * WIDTH) + WIDTH + columns % WIDTH
    gates = rounded(tl.sigmoid(_summed(shares, offsets, mask, share_stride, SHARES, dtype)), dtype)
    places = token * (HEADS * WIDTH) + columns
    numbers = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, (numbers * gates).to(dtype), mask=mask)
