"""Triton kernels of LoRA adapters: A x and B (A x) of each row's own adapter, for all linears of a product.
Importing them needs triton; `adapter_products` launches them.

Which adapter a row has is read on the device, so a recorded step may have any. A program of a row without an
adapter, or behind its adapter's rank, ends at once. Sums are float32; A x is rounded to the model's dtype. A
row's result depends on that row alone.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def shrink(
    x, down, slots, ranks, low, width, num_slots,
    RANK: tl.constexpr, RANKS: tl.constexpr, LINEARS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (T, LINEARS, RANK / RANKS): some of what one linear's A makes of one row. x [T, width], down
    [LINEARS * num_slots * RANK, width], low [T, LINEARS, RANK]."""
    row, linear = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int32)
    own = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    rank = tl.load(ranks + slot)
    if (slot == 0) | (tl.program_id(2) * RANKS >= rank):
        return
    rows = ((linear * num_slots + slot - 1) * RANK + own).to(tl.int64)
    sums = tl.zeros([RANKS, STEP], tl.float32)
    for begin in range(0, width, STEP):
        columns = begin + tl.arange(0, STEP)
        inside = columns < width
        values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        mask = (own < rank)[:, None] & inside[None, :]
        weights = tl.load(down + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
        sums += weights.to(tl.float32) * values[None, :]
    kept = tl.sum(sums, 1).to(low.dtype.element_ty)
    tl.store(low + (row * LINEARS + linear) * RANK + own, kept, mask=own < rank)


@triton.jit
def expand(
    low, up, slots, ranks, ends, y, num_outputs, num_slots,
    RANK: tl.constexpr, LINEARS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of y): adds to some outputs of one row. low [T, LINEARS, RANK], up
    [LINEARS * num_slots * RANK, num_outputs], y [T, num_outputs], ends [1 + LINEARS]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int32)
    if slot == 0:
        return
    rank, first = tl.load(ranks + slot), tl.program_id(1) * TILE
    columns = first + tl.arange(0, TILE)
    inside = columns < num_outputs
    sums = tl.zeros([TILE], tl.float32)
    for linear in range(LINEARS):
        if (first < tl.load(ends + linear + 1)) & (first + TILE > tl.load(ends + linear)):
            rows = ((linear * num_slots + slot - 1) * RANK).to(tl.int64)
            for i in range(rank):
                factor = tl.load(low + (row * LINEARS + linear) * RANK + i).to(tl.float32)
                weights = tl.load(up + (rows + i) * num_outputs + columns, mask=inside, other=0.0)
                sums += factor * weights.to(tl.float32)
    target = y + row * num_outputs + columns
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32) + sums
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)
