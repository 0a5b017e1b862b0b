"""Triton kernels of LoRA adapters: A x and B (A x) of each row's own adapter, for all linears of a product.
Importing them needs triton; `adapter_products` launches them.

Which adapter a row has is read on the device, so a recorded step may have any. One answer's adapters are few
bytes, so what takes time is loads that wait for each other: a program has one tile of weights, and loads it
at once. Hence A x comes in shares of the width, which `expand` adds up in their order. Nothing is read of a
row without an adapter, nor behind its adapter's rank. Sums are float32; A x is rounded to the model's dtype.
A row's result depends on that row alone.

OVERLAPS: the launch before may still run (programmatic dependent launch, from sm_90 on), so slots and weights,
which it does not write, are loaded before it is waited for. Every program waits, so that whoever waits for
these has waited for all before.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _slot_and_rank(slots, ranks, row, num_slots, SLOTS: tl.constexpr):
    """Rank 0: the row has no adapter, or its adapter changes none of these linears. Neither load waits for
    the other."""
    numbers = tl.arange(0, SLOTS)
    every = tl.load(ranks + numbers, mask=numbers <= num_slots, other=0)
    slot = tl.load(slots + row).to(tl.int32)
    return slot, tl.sum(tl.where((numbers == slot) & (slot > 0), every, 0), 0)


@triton.jit
def _wait(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def shrink(
    x, down, slots, ranks, low, width, num_slots, num_shares,
    RANK: tl.constexpr, RANKS: tl.constexpr, LINEARS: tl.constexpr, SLOTS: tl.constexpr, STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (T, LINEARS * runs of RANKS, shares): what some columns of x add to some of what one linear's A
    makes of one row. x [T, width], down [LINEARS * num_slots * RANK, width], low float32 [T, LINEARS, shares,
    RANK], where nothing is written from the rank of the row's adapter on; SLOTS > num_slots."""
    runs: tl.constexpr = (RANK + RANKS - 1) // RANKS
    row, linear = tl.program_id(0).to(tl.int64), tl.program_id(1) // runs
    first, share = tl.program_id(1) % runs * RANKS, tl.program_id(2)
    own, columns = first + tl.arange(0, RANKS), share * STEP + tl.arange(0, STEP)
    slot, rank = _slot_and_rank(slots, ranks, row, num_slots, SLOTS)
    rows = ((linear * num_slots + slot - 1) * RANK + own).to(tl.int64)
    mask = (own < rank)[:, None] & (columns < width)[None, :]
    weights = tl.load(down + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    _wait(OVERLAPS)
    if first < rank:
        values = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        sums = tl.sum(weights.to(tl.float32) * values[None, :], 1)
        place = ((row * LINEARS + linear) * num_shares + share) * RANK
        tl.store(low + place + own, sums, mask=own < rank)


@triton.jit
def _rows_of_up(
    up, slot, rank, linear, first, columns, num_outputs, num_slots, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """RANKS rows of one linear's B from `first` on, 0 from `rank` on. [RANKS, len(columns)]."""
    own = first + tl.arange(0, RANKS)
    rows = ((linear * num_slots + slot - 1) * RANK + own).to(tl.int64)
    mask = (own < rank)[:, None] & (columns < num_outputs)[None, :]
    return tl.load(up + rows[:, None] * num_outputs + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _added(
    weights, low, rank, place, first, num_shares,
    RANK: tl.constexpr, RANKS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """What rows of B add. place: of a row and a linear in `low`. Returns [columns] float32."""
    own, shares = first + tl.arange(0, RANKS), tl.arange(0, SHARES)
    mask = (shares < num_shares)[:, None] & (own < rank)[None, :]
    places = (place * num_shares + shares)[:, None] * RANK + own[None, :]
    factors = tl.sum(tl.load(low + places, mask=mask, other=0.0), 0)
    factors = factors.to(weights.dtype).to(tl.float32)
    return tl.sum(weights.to(tl.float32) * factors[:, None], 0)


@triton.jit
def expand(
    low, up, slots, ranks, ends, y, num_outputs, num_slots, num_shares,
    RANK: tl.constexpr, RANKS: tl.constexpr, LINEARS: tl.constexpr, ENDS: tl.constexpr, SLOTS: tl.constexpr,
    SHARES: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of y): adds to some outputs of one row. low as `shrink` writes it, up
    [LINEARS * num_slots * RANK, num_outputs], y [T, num_outputs], ends [1 + LINEARS]; ENDS > LINEARS, SHARES
    >= num_shares, powers of two."""
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    columns, numbers = begin + tl.arange(0, TILE), tl.arange(0, ENDS)
    every = tl.load(ends + numbers, mask=numbers <= LINEARS, other=0)
    slot, rank = _slot_and_rank(slots, ranks, row, num_slots, SLOTS)
    # of the linears with outputs in this tile, and of the first one's first ranks, whose weights are loaded
    # before the wait
    linear = tl.sum(((numbers > 0) & (numbers <= LINEARS) & (every <= begin)).to(tl.int32), 0)
    stop = tl.sum(((numbers < LINEARS) & (every < begin + TILE)).to(tl.int32), 0)
    rank = tl.where(linear < stop, rank, 0)
    weights = _rows_of_up(up, slot, rank, linear, 0, columns, num_outputs, num_slots, RANK, RANKS)
    _wait(OVERLAPS)
    if rank > 0:
        target, inside = y + row * num_outputs + columns, columns < num_outputs
        total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        total += _added(weights, low, rank, row * LINEARS + linear, 0, num_shares, RANK, RANKS, SHARES)
        first = RANKS
        while linear < stop:
            while first < rank:
                weights = _rows_of_up(
                    up, slot, rank, linear, first, columns, num_outputs, num_slots, RANK, RANKS
                )
                total += _added(
                    weights, low, rank, row * LINEARS + linear, first, num_shares, RANK, RANKS, SHARES
                )
                first += RANKS
            linear, first = linear + 1, 0
        tl.store(target, total.to(y.dtype.element_ty), mask=inside)
