"""Triton kernels of LoRA adapters: A x and B (A x) of each row's own adapter, for all linears of a product.
Importing them needs triton; `adapter_products` launches them.

Which adapter a row has is read on the device, so a recorded step may have any. One answer's adapters are few
bytes, so what takes time is loads that wait for each other: a program has one tile of weights, and loads it
at once. Hence A x comes in shares of the width, which `expand` adds up in their order. Where there are many
rows a program has several, in the order of their slots, and loads the weights of each adapter once. Nothing
is read of a row without an adapter, nor behind its adapter's rank. Sums are float32; A x is rounded to the
model's dtype. A row's result depends on that row alone.

Adapters, and the slots of a step's rows, are written before a launch that is not early (`early`), so `expand`
always reads them, and weights, before it waits for `shrink`; so does `shrink` itself, unless rows have an
order, which may be as new as the launch before it.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import let_next_begin, wait_for_last


@triton.jit
def _row_at(place, order, slots, end, every, numbers):
    """Returns row, slot and rank at a place of the order; every [SLOTS]: the slots' ranks; numbers: 0, 1, ...
    No load waits for another. order, slots [T]: the rows by their slots, and these; without an order rows are
    at their own places. Rank 0: the row has no adapter, or its adapter changes none of these linears, or the
    place is behind the last."""
    row = place.to(tl.int64)
    if order is not None:
        row = tl.load(order + place, mask=place < end, other=0)
    slot = tl.load(slots + place, mask=place < end, other=0).to(tl.int32)
    return row, slot, tl.sum(tl.where((numbers == slot) & (slot > 0), every, 0), 0)


@triton.jit
def _matrix(
    weights, slot, rank, linear, first, columns, num_columns, num_slots,
    RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Some columns of RANKS rows of one linear's A or B, from the rank `first` on, as `SlotMatrices` has
    them; 0 from `rank` on."""
    own = first + tl.arange(0, RANKS)
    rows = ((linear * num_slots + slot - 1) * RANK + own).to(tl.int64)
    mask = (own < rank)[:, None] & (columns < num_columns)[None, :]
    return tl.load(weights + rows[:, None] * num_columns + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x, down, order, slots, ranks, low, num_rows, width, num_slots, num_shares,
    RANK: tl.constexpr, RANKS: tl.constexpr, LINEARS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (runs of ROWS rows, LINEARS * runs of RANKS, shares): what some columns of x add to some of what
    one linear's A makes of these rows. x [T, width], down [LINEARS * num_slots * RANK, width], low float32
    [T, LINEARS, shares, RANK], where nothing is written from the rank of the row's adapter on. SLOTS >
    num_slots is a power of two."""
    runs: tl.constexpr = (RANK + RANKS - 1) // RANKS
    linear, first = tl.program_id(1) // runs, tl.program_id(1) % runs * RANKS
    own, columns = first + tl.arange(0, RANKS), tl.program_id(2) * STEP + tl.arange(0, STEP)
    numbers = tl.arange(0, SLOTS)
    wait_for_last(EARLY and order is not None)
    let_next_begin(EARLY)
    every = tl.load(ranks + numbers, mask=numbers <= num_slots, other=0)
    place = tl.program_id(0) * ROWS
    end = tl.minimum(place + ROWS, num_rows)
    row, slot, rank = _row_at(place, order, slots, end, every, numbers)
    weights = _matrix(down, slot, rank, linear, first, columns, width, num_slots, RANK, RANKS)
    wait_for_last(EARLY and order is None)
    for i in range(ROWS):
        if first < rank:
            values = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
            sums = tl.sum(weights.to(tl.float32) * values[None, :], 1)
            target = ((row * LINEARS + linear) * num_shares + tl.program_id(2)) * RANK
            tl.store(low + target + own, sums, mask=own < rank)
        if ROWS > 1:
            loaded = slot
            row, slot, rank = _row_at(place + i + 1, order, slots, end, every, numbers)
            if slot != loaded:
                weights = _matrix(down, slot, rank, linear, first, columns, width, num_slots, RANK, RANKS)


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


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    low, up, order, slots, ranks, ends, y, num_rows, num_outputs, num_slots, num_shares,
    RANK: tl.constexpr, RANKS: tl.constexpr, LINEARS: tl.constexpr, ENDS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (runs of ROWS rows, tiles of y): adds to some outputs of these rows. low as `shrink` writes it, up
    [LINEARS * num_slots * RANK, num_outputs], y [T, num_outputs], ends [1 + LINEARS]. ENDS > LINEARS and
    SHARES >= num_shares are powers of two."""
    let_next_begin(EARLY)
    begin = tl.program_id(1) * TILE
    columns, numbers = begin + tl.arange(0, TILE), tl.arange(0, SLOTS)
    every = tl.load(ranks + numbers, mask=numbers <= num_slots, other=0)
    places = tl.arange(0, ENDS)
    limits = tl.load(ends + places, mask=places <= LINEARS, other=0)
    # linears with outputs in this tile: from `head` to before `stop`
    head = tl.sum(((places > 0) & (places <= LINEARS) & (limits <= begin)).to(tl.int32), 0)
    stop = tl.sum(((places < LINEARS) & (limits < begin + TILE)).to(tl.int32), 0)
    every = tl.where(head < stop, every, 0)
    place = tl.program_id(0) * ROWS
    end = tl.minimum(place + ROWS, num_rows)
    row, slot, rank = _row_at(place, order, slots, end, every, numbers)
    weights = _matrix(up, slot, rank, head, 0, columns, num_outputs, num_slots, RANK, RANKS)
    wait_for_last(EARLY)
    for i in range(ROWS):
        if rank > 0:
            target, inside = y + row * num_outputs + columns, columns < num_outputs
            total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            total += _added(weights, low, rank, row * LINEARS + head, 0, num_shares, RANK, RANKS, SHARES)
            linear, first = head, RANKS  # and what else there is of B, which is rare
            while linear < stop:
                while first < rank:
                    more = _matrix(
                        up, slot, rank, linear, first, columns, num_outputs, num_slots, RANK, RANKS
                    )
                    total += _added(
                        more, low, rank, row * LINEARS + linear, first, num_shares, RANK, RANKS, SHARES
                    )
                    first += RANKS
                linear, first = linear + 1, 0
            tl.store(target, total.to(y.dtype.element_ty), mask=inside)
        if ROWS > 1:
            loaded = slot
            row, slot, rank = _row_at(place + i + 1, order, slots, end, every, numbers)
            if slot != loaded:
                weights = _matrix(up, slot, rank, head, 0, columns, num_outputs, num_slots, RANK, RANKS)
