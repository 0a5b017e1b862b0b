"""Triton kernels that draw the tokens of rows with top-k, top-p or min-p. Importing them needs triton; `draw`
launches them after `draw_kernels.tile_scores`.

A token's place is one integer: its score, as an integer of the same order, above its id. Every filter keeps
the tokens from some place on, the greatest of which are the row's: top-k and min-p begin at the id 0 of some
score, so they keep tokens of equal scores together; top-p may begin between two, and drops the smaller id
first, as a stable sort does. `list_candidates` lists the tokens that may be kept, from a lower bound of that
place. `draw_filtered` finds it by bisection over the candidates alone, two steps a pass, until one is left,
and draws from what is kept.

The lower bounds: for top-k, the k-th largest of the largest scores of parts of the row; for top-p, the score
below which lies no more than the probability that is dropped, as the numbers of tokens in steps of 1/3 of a
score tell; for min-p, the threshold itself.

Sums of probabilities are float32. So the kept tokens are those of `sampling.keep_likely` unless the
probability of a token and all below it is within about 1e-5 of 1 - top-p, or a token's probability within
that of min-p's floor.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.draw_kernels import (
    LARGEST,
    exact_noise,
    has_filter,
    least_winning,
    mass_of,
    noise_words,
    quick_noise,
    row_of,
    scaled,
    steps_below,
)

ID_BITS = tl.constexpr(24)
ID_STEP, ID_MASK = tl.constexpr(1 << 24), tl.constexpr((1 << 24) - 1)
FIRST = tl.constexpr(-(1 << 62))  # before every place


@triton.jit
def _order(scores):
    """int32 in the order of the float32 scores; both zeros are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(places):
    order = (places >> ID_BITS).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(scores):
    """The place of a token whose id is 0."""
    return _order(scores).to(tl.int64) << ID_BITS


@triton.jit
def _row_mass(scores, masses, num_tiles, TILES_PAD: tl.constexpr):
    """The row's largest score, and its sum of exp(score - the largest)."""
    tiles = tl.arange(0, TILES_PAD)
    mask, at = tiles < num_tiles, tl.program_id(0) * num_tiles + tiles
    tops = tl.load(scores + at, mask=mask, other=-float("inf"))
    top = tl.max(tops, 0)
    return top, tl.sum(tl.load(masses + at, mask=mask, other=0.0) * mass_of(tops, top), 0)


@triton.jit
def _floor_of_min_p(top, min_p):
    """A score; without min-p -inf."""
    return tl.where(min_p > 0, top + tl.minimum(tl.log(tl.where(min_p > 0, min_p, 1.0)), 0.0), -float("inf"))


@triton.jit
def _floor_of_top_p(
    scores, parts, top, mass, limit, vocab_size, num_tiles, PARTS: tl.constexpr, TILES_PAD: tl.constexpr
):
    """A score below which lies no more than the probability that is dropped, less 1e-5 for what sums are off
    by, if all tokens lay at the upper ends of their steps; or if a whole vocabulary lay there."""
    tiles, steps = tl.arange(0, TILES_PAD), tl.arange(0, PARTS)
    at = tl.program_id(0) * num_tiles + tiles
    tops = tl.load(scores + at, mask=tiles < num_tiles, other=-float("inf"))
    of_tile = steps[None, :] - steps_below(tops, top)[:, None]
    is_there = (of_tile >= 0) & (steps < PARTS - 1)[None, :]
    own = at[:, None] * PARTS + tl.where(is_there, of_tile, 0).to(tl.int32)
    num = tl.sum(tl.load(parts + own, mask=is_there, other=0.0), 0)
    num = tl.where(steps < PARTS - 1, num, vocab_size - tl.sum(num, 0))
    ends = (tl.floor(top * 3.0) + 1 - steps) / 3.0 + 5e-7 * tl.abs(top)  # not below a score, as rounded
    below = tl.cumsum(num * tl.exp(ends - top), 0, reverse=True)
    by_steps = tl.max(tl.where(below <= (limit - 1e-5) * mass, ends, -float("inf")), 0)
    return tl.maximum(by_steps, top + tl.minimum(tl.log(limit * mass / vocab_size), 0.0))


@triton.jit
def _floor_of_top_k(peaks, num_peaks, top_k, PEAKS_PAD: tl.constexpr):
    """A score, rounded down to 16 bits, that top_k peaks of the row reach; with fewer peaks the least there
    is."""
    at = tl.arange(0, PEAKS_PAD)
    found = tl.load(peaks + tl.program_id(0) * num_peaks + at, mask=at < num_peaks, other=-float("inf"))
    orders = tl.where(at < num_peaks, _order(found) >> 16, -32768)
    low, high = tl.full((), -32768, tl.int32), tl.full((), 32768, tl.int32)
    for _ in range(16):
        middle = (low + high) >> 1
        has_enough = tl.sum((orders >= middle).to(tl.int32), 0) >= top_k
        low, high = tl.where(has_enough, middle, low), tl.where(has_enough, high, middle)
    return (low << 16).to(tl.int64) << ID_BITS


@triton.jit
def list_candidates(
    logits, records, scores, masses, parts, listed, counts, boundaries, row_stride, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles). listed [rows, tiles * TILE] int64: the places of the candidates of each tile, in
    the order of ids, from the tile's begin on; counts [rows, tiles] int32; boundaries [rows] int64: the
    lower bound of all of them. Of rows with filters."""
    _, temperature, top_k, limit, min_p = row_of(records)
    if not has_filter(temperature, top_k, limit, min_p):
        return
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, mass = _row_mass(scores, masses, num_tiles, TILES_PAD)
    if (top == -float("inf")) | (top >= LARGEST):
        floor = _place(top)
    elif top_k > 0:
        floor = _floor_of_top_k(parts, num_tiles * PARTS, top_k, PARTS_PAD)
    elif limit > 0:
        floor = _floor_of_top_p(scores, parts, top, mass, limit, vocab_size, num_tiles, PARTS, TILES_PAD)
        floor = _place(floor - 0.001 - 1e-6 * tl.abs(top))  # by more than what rounding does
    else:
        floor = _place(_floor_of_min_p(top, min_p))
    count = tl.full((), 0, tl.int32)
    if _place(tl.load(scores + row * num_tiles + tile)) >= floor:
        ids = tile * TILE + tl.arange(0, TILE)
        own = scaled(logits + row * row_stride, ids, ids < vocab_size, temperature)
        places = _place(own) | ids.to(tl.int64)
        is_candidate = (places >= floor) & (ids < vocab_size)
        before = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        tl.store(listed + (row * num_tiles + tile) * TILE + before, places, mask=is_candidate)
        count = tl.sum(is_candidate.to(tl.int32), 0)
    tl.store(counts + row * num_tiles + tile, count)
    if tile == 0:
        tl.store(boundaries + row, floor)


@triton.jit
def _candidates(listed, counts, start, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """[tiles, SLOTS] int64: the places of candidates `start` and later of each tile; FIRST where there is
    none."""
    tiles, slots = tl.arange(0, counts.shape[0]), start + tl.arange(0, SLOTS)
    return tl.load(
        listed + tiles[:, None] * TILE + slots[None, :], mask=slots[None, :] < counts[:, None], other=FIRST
    )


@triton.jit
def count_from(listed, counts, place, step, top, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """How many candidates are at `place` or later, and the sum of their exp(score - top); then the same one
    step later, and two steps later."""
    num = tl.zeros([counts.shape[0], SLOTS], tl.int32)
    mass = tl.zeros([counts.shape[0], SLOTS], tl.float32)
    num_1, mass_1, num_2, mass_2 = num, mass, num, mass
    for start in range(0, tl.max(counts, 0), SLOTS):
        places = _candidates(listed, counts, start, TILE, SLOTS)
        own = mass_of(_score(places), top)
        num, mass = _with_later(num, mass, places >= place, own)
        num_1, mass_1 = _with_later(num_1, mass_1, places >= place + step, own)
        num_2, mass_2 = _with_later(num_2, mass_2, places >= place + 2 * step, own)
    return tl.sum(num), tl.sum(mass), tl.sum(num_1), tl.sum(mass_1), tl.sum(num_2), tl.sum(mass_2)


@triton.jit
def _with_later(num, mass, is_later, own):
    return num + is_later.to(tl.int32), mass + tl.where(is_later, own, 0.0)


@triton.jit
def _boundary(
    listed, counts, low, num_low, top, least_num, least_mass,
    step: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The last place from which on there are `least_num` candidates with `least_mass`, or one that as many
    tokens reach; a multiple of `step`. At `low` are enough, num_low. Each pass takes two steps of a
    bisection."""
    high, num_high = _place(top) + ID_STEP, tl.full((), 0, tl.int32)
    while (high - low > step) & (num_low > least_num) & (num_low - num_high > 1):
        quarter = tl.maximum(((high - low) >> 2) & -step, step)
        middle = low + 2 * quarter
        num_1, mass_1, num_2, mass_2, num_3, mass_3 = count_from(
            listed, counts, low + quarter, quarter, top, TILE, SLOTS
        )
        has_enough = (num_2 >= least_num) & (mass_2 >= least_mass)
        num, mass = tl.where(has_enough, num_3, num_1), tl.where(has_enough, mass_3, mass_1)
        low, num_low = tl.where(has_enough, middle, low), tl.where(has_enough, num_2, num_low)
        high, num_high = tl.where(has_enough, high, middle), tl.where(has_enough, num_high, num_2)
        has_enough = (num >= least_num) & (mass >= least_mass)
        middle = low + quarter
        low, num_low = tl.where(has_enough, middle, low), tl.where(has_enough, num, num_low)
        high, num_high = tl.where(has_enough, high, middle), tl.where(has_enough, num_high, num)
    return low, num_low


@triton.jit
def draw_filtered(
    records, scores, masses, listed, counts, tokens, boundaries, num_tiles, vocab_size,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr, SLOTS: tl.constexpr, DRAW_SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). tokens [rows] int64 and boundaries [rows] int64: before, their lower bounds; after, the
    places from which on tokens are kept. Of the rows with filters; the others' stay as they are."""
    key, temperature, top_k, limit, min_p = row_of(records)
    if not has_filter(temperature, top_k, limit, min_p):
        return
    row = tl.program_id(0)
    listed += row.to(tl.int64) * num_tiles * TILE
    tiles = tl.arange(0, TILES_PAD)
    sizes = tl.load(counts + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    top, mass = _row_mass(scores, masses, num_tiles, TILES_PAD)
    low, num_low = tl.load(boundaries + row), tl.sum(sizes, 0)
    if (top > -float("inf")) & (top < LARGEST):
        if top_k > 0:
            low, num_low = _boundary(
                listed, sizes, low, num_low, top, top_k.to(tl.int32), 0.0, ID_STEP, TILE, SLOTS
            )
        if limit > 0:
            if top_k > 0:
                _, mass, _, _, _, _ = count_from(listed, sizes, low, 0, top, TILE, SLOTS)
            low, num_low = _boundary(
                listed, sizes, low, num_low, top, 1, (1.0 - limit) * mass, 1, TILE, SLOTS
            )
        low = tl.maximum(low, _place(_floor_of_min_p(top, min_p)))
    tl.store(boundaries + row, low)
    tl.store(tokens + row, _draw(listed, sizes, low, key, vocab_size, TILE, DRAW_SLOTS).to(tl.int64))


@triton.jit
def _draw(listed, counts, low, key, vocab_size, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """The token id of the largest sum of score and noise, of candidates from `low` on: first in float32, then
    exactly where the largest may be."""
    most = tl.full([counts.shape[0], SLOTS], -float("inf"), tl.float32)
    longest = tl.max(counts, 0)
    for start in range(0, longest, SLOTS):
        places = _candidates(listed, counts, start, TILE, SLOTS)
        most = tl.maximum(most, _quick_sums(places, low, key))
    floor = least_winning(tl.max(tl.max(most, 1), 0))
    best, token = tl.full((), -float("inf"), tl.float64), vocab_size
    for start in range(0, longest, SLOTS):
        places = _candidates(listed, counts, start, TILE, SLOTS)
        may_win = (_quick_sums(places, low, key) >= floor) & (places >= low)
        if tl.max(tl.max(may_win.to(tl.int32), 1), 0) > 0:
            ids = _ids(places)
            own = _score(places).to(tl.float64) + exact_noise(noise_words(key, ids))
            own = tl.where(may_win, own, -float("inf"))
            largest = tl.max(tl.max(own, 1), 0)
            first = tl.min(tl.min(tl.where(may_win & (own == largest), ids, vocab_size), 1), 0)
            token = tl.where(
                largest > best, first, tl.where(largest == best, tl.minimum(token, first), token)
            )
            best = tl.maximum(best, largest)
    return token


@triton.jit
def _ids(places):
    return (places & ID_MASK).to(tl.int32)


@triton.jit
def _quick_sums(places, low, key):
    """-inf for tokens before `low`."""
    sums = _score(places) + quick_noise(noise_words(key, _ids(places)))
    return tl.where((places >= low) & (places > FIRST), sums, -float("inf"))
