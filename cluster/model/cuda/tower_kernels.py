"""Triton kernels of a block of a vision or audio tower: of what lies between its matrix products, but for
attention (`packed_kernels`) and the product of gate and up (`layer_kernels.gate`). Importing them needs
triton; `tower_calls` launches them and says what they compute.

Sums are float32, and a value is rounded to the model's dtype where transformers' modules round it. A row's
result depends on that row alone. `*_PAD` is a size rounded up to a power of two.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import begin, let_next_begin, wait_for_last
from cluster.model.cuda.layer_kernels import acted, factors_of, rounded, weighted


@triton.jit
def add_norm_row(
    x, added, total, out, weight, shift, epsilon,
    WIDTH: tl.constexpr, PAD: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T,): one row a program. added None: x is normed as it is, and total is not written. shift None:
    an RMSNorm of `FORM`; else a LayerNorm. weight and shift are read while the kernel before ends."""
    let_next_begin(EARLY)
    columns = tl.arange(0, PAD)
    mask = columns < WIDTH
    factors = factors_of(weight, columns, mask)
    summands = factors_of(shift, columns, mask)
    wait_for_last(EARLY)
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + columns
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if added is not None:
        row = rounded(row + tl.load(added + offsets, mask=mask, other=0.0).to(tl.float32), dtype)
        tl.store(total + offsets, row.to(dtype), mask=mask)
    if shift is not None:
        centred = tl.where(mask, row - tl.sum(row, 0) / WIDTH, 0.0)
        scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + epsilon)
        normed = scaled * factors + summands
    else:
        scaled = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
        normed = weighted(scaled, factors, FORM, dtype)
    tl.store(out + offsets, normed.to(dtype), mask=mask)


@triton.jit
def _rotate_tile(
    source, target, cos, sin, weight, epsilon, heads, num_heads,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, WIDTH columns each: both halves of a head are read once and lie in the same
    registers, so no column waits for its partner."""
    dtype: tl.constexpr = target.dtype.element_ty
    columns = tl.arange(0, HALF_PAD)
    inside = columns < HALF
    mask = (heads < num_heads)[:, None] & inside[None, :]
    offsets = heads[:, None] * WIDTH + columns[None, :]
    first = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    if cos is not None:  # nothing that is loaded waits for the norm
        first_cos = tl.load(cos + columns, mask=inside, other=1.0).to(tl.float32)[None, :]
        first_sin = tl.load(sin + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        second_cos = tl.load(cos + HALF + columns, mask=inside, other=1.0).to(tl.float32)[None, :]
        second_sin = tl.load(sin + HALF + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if weight is not None:
        factors = factors_of(weight, columns[None, :], inside[None, :])
        second_factors = factors_of(weight + HALF, columns[None, :], inside[None, :])
        squares = tl.sum(first * first + second * second, 1)
        inverse = tl.rsqrt(squares / WIDTH + epsilon)[:, None]
        first = weighted(first * inverse, factors, FORM, dtype)
        second = weighted(second * inverse, second_factors, FORM, dtype)
    if cos is not None:
        rotated = first * first_cos - second * first_sin
        second = second * second_cos + first * second_sin
        first = rotated
    tl.store(target + offsets, first.to(dtype), mask=mask)
    tl.store(target + offsets + HALF, second.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_table_rows"])
def rotate_heads(
    qkv, out, cos, sin, query_weight, key_weight, query_epsilon, key_epsilon, num_table_rows, table_stride,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, FORM: tl.constexpr, ALIGNMENT: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, tiles): HEADS heads of one row a program; first tiles of q, then of k. qkv [T, (QUERY_HEADS +
    2 * KV_HEADS) * WIDTH]. out [T, QUERY_HEADS + KV_HEADS, WIDTH]. cos and sin None: heads are only normed;
    weights None: they are only rotated. A row's angles stand in row T modulo num_table_rows. ALIGNMENT
    divides table_stride, so that angles are loaded in vectors."""
    begin(EARLY)
    half: tl.constexpr = WIDTH // 2
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    qkv += row * ((QUERY_HEADS + 2 * KV_HEADS) * WIDTH)
    out += row * ((QUERY_HEADS + KV_HEADS) * WIDTH)
    if cos is not None:
        angles = row % num_table_rows * tl.multiple_of(table_stride, ALIGNMENT)
        cos += tl.multiple_of(angles, ALIGNMENT)
        sin += tl.multiple_of(angles, ALIGNMENT)
    members = tl.arange(0, HEADS)
    if tile < query_tiles:
        _rotate_tile(
            qkv, out, cos, sin, query_weight, query_epsilon, tile * HEADS + members, QUERY_HEADS,
            WIDTH, half, HALF_PAD, FORM,
        )  # fmt: skip
    else:
        first: tl.constexpr = QUERY_HEADS * WIDTH
        _rotate_tile(
            qkv + first, out + first, cos, sin, key_weight, key_epsilon,
            (tile - query_tiles) * HEADS + members, KV_HEADS, WIDTH, half, HALF_PAD, FORM,
        )  # fmt: skip


@triton.jit
def activate(
    x, out, alpha, size, TILE: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr = False
):  # fmt: skip
    """Grid (cdiv(size, TILE),): any elements that lie side by side."""
    begin(EARLY)
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = places < size
    numbers = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, acted(numbers, alpha, KIND).to(out.dtype.element_ty), mask=mask)
