"""Triton kernels that draw tokens by the formula of `cluster.model.sampling`. Importing them needs triton;
`draw` launches them.

The noise of a token is two logarithms of 64-bit numbers, and hardly any token can win. So `tile_scores`
finds, for each tile of a row, its largest score in float32, and `draw_rows` computes exactly only the tiles
whose largest score is within the error of the row's. Equal scores go to the smaller token id, as by `argmax`,
NaN is above everything, and infinity is the largest number. Rows with filters go another way: see
`filter_kernels`.

A record of `WORDS` int64 describes a row: its key; top-k, 0 without; the bits of two float32, its temperature
and 1 - top-p, 0 without; the bits of min-p, 0 without. A negative temperature has neither noise nor filters:
the draw is greedy. top-k is below the vocabulary's size.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model import sampling

GAMMA, MIX_1 = tl.constexpr(sampling.GAMMA), tl.constexpr(sampling.MIX_1)
MIX_2 = tl.constexpr(sampling.MIX_2)
STEP = tl.constexpr(2.0**-53)  # between two uniform numbers
LARGEST = tl.constexpr(3.4028234663852886e38)
# Of scores in float32, relative to the largest score and 64, which is more than any noise: the noise is off
# by 1e-5 at most, and scores are rounded.
SLACK = tl.constexpr(2.0**-15)
WORDS = tl.constexpr(4)


@triton.jit
def noise_words(key, ids):
    """[len(ids)] int64: the 53 random bits of each token."""
    word = key.to(tl.uint64) + (ids + 1).to(tl.uint64) * GAMMA
    word = (word ^ (word >> 30)) * MIX_1
    word = (word ^ (word >> 27)) * MIX_2
    return ((word ^ (word >> 31)) >> 11).to(tl.int64)


@triton.jit
def exact_noise(words):
    """Standard Gumbel noise in float64."""
    largest = tl.full((), 1.0, tl.float64) - STEP  # as a constant it would be a float32, and 1
    uniform = tl.minimum((words.to(tl.float64) + 0.5) * STEP, largest)
    return -tl.log(-tl.log(uniform))


@triton.jit
def quick_noise(words):
    """Standard Gumbel noise in float32. Where u is near 1, -log(u) is taken from 1 - u, which keeps its
    digits: a power series, cut after the fifth term, for 1 - u below 1/16."""
    below = (words.to(tl.float32) + 0.5) * STEP
    above = ((9007199254740991 - words).to(tl.float32) + 0.5) * STEP
    series = above * (1.0 + above * (1 / 2 + above * (1 / 3 + above * (1 / 4 + above * (1 / 5)))))
    return -tl.log(tl.where(above < 0.0625, series, -tl.log(below)))


@triton.jit
def scaled(logits, ids, mask, temperature):
    """The logits over the temperature, float32. Infinity is the largest number; NaN becomes infinity."""
    own = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    own = tl.where(temperature < 0, own, tl.div_rn(own, tl.where(temperature < 0, 1.0, temperature)))
    return tl.where(own != own, float("inf"), tl.minimum(own, LARGEST))


@triton.jit
def row_of(records):
    """The key, the temperature, top-k, 1 - top-p and min-p of this program's row."""
    record = records + WORDS * tl.program_id(0)
    shares = tl.load(record + 2)
    temperature = shares.to(tl.int32).to(tl.float32, bitcast=True)
    limit = (shares >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    min_p = tl.load(record + 3).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(record), temperature, tl.load(record + 1), limit, min_p


@triton.jit
def has_filter(temperature, top_k, limit, min_p):
    return (temperature >= 0) & ((top_k > 0) | (limit > 0) | (min_p > 0))


@triton.jit
def mass_of(scores, top):
    """The probabilities of the tokens, relative to that of a token whose score is `top`."""
    return tl.where(scores == -float("inf"), 0.0, tl.exp(scores - top))


@triton.jit
def steps_below(scores, top):
    """float32: how many steps of 1/3, counted from 0, the scores lie below `top`; NaN between infinities."""
    return tl.floor(top * 3.0) - tl.floor(scores * 3.0)


@triton.jit
def tile_scores(
    logits, records, scores, masses, parts, row_stride, vocab_size,
    TILE: tl.constexpr, PARTS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles). scores [rows, tiles] float32: the largest of each tile, with its noise if the
    row has no filter. FILTERS: some rows have one; then, for these, without noise, masses [rows, tiles]
    float32: the sum of exp(score - the tile's largest), and parts [rows, tiles * PARTS] float32: of rows
    with top-k the largest scores of disjoint parts of each tile, of others how many scores lie each number
    of steps below the tile's largest, the last one or more."""
    key, temperature, top_k, limit, min_p = row_of(records)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = scaled(logits + tl.program_id(0).to(tl.int64) * row_stride, ids, ids < vocab_size, temperature)
    if FILTERS:
        is_filtered = has_filter(temperature, top_k, limit, min_p)
        if is_filtered:
            top = tl.max(own, 0)
            tl.store(masses + place, tl.sum(mass_of(own, top), 0))
            own_parts = parts + place * PARTS + tl.arange(0, PARTS)
            if top_k > 0:
                tl.store(own_parts, tl.max(tl.reshape(own, [TILE // PARTS, PARTS]), 0))
            else:
                steps = steps_below(own, top)
                steps = tl.where(steps < PARTS - 1, steps, PARTS - 1).to(tl.int32)
                tl.store(own_parts, tl.histogram(steps, PARTS).to(tl.float32))
        if (temperature >= 0) & (not is_filtered):
            own += quick_noise(noise_words(key, ids))
    else:
        if temperature >= 0:
            own += quick_noise(noise_words(key, ids))
    tl.store(scores + place, tl.max(own, 0))


@triton.jit
def draw_rows(
    logits, records, scores, tokens, row_stride, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). tokens [rows] int64, of the rows that have no filter. `scores`: of `tile_scores`.
    TILES_PAD: num_tiles rounded up to a power of two."""
    key, temperature, top_k, limit, min_p = row_of(records)
    if has_filter(temperature, top_k, limit, min_p):
        return
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    tiles = tl.arange(0, TILES_PAD)
    found = tl.load(
        scores + tl.program_id(0) * num_tiles + tiles, mask=tiles < num_tiles, other=-float("inf")
    )
    floor = least_winning(tl.max(found, 0))
    waiting = ((found >= floor) & (tiles < num_tiles)).to(tl.int32)
    best, token = tl.full((), -float("inf"), tl.float64), tl.full((), -1, tl.int32)
    for _ in range(tl.sum(waiting, 0)):
        tile = tl.min(tl.where(waiting > 0, tiles, TILES_PAD), 0)
        waiting = tl.where(tiles == tile, 0, waiting)
        ids = tile * TILE + tl.arange(0, TILE)
        own = scaled(row, ids, ids < vocab_size, temperature).to(tl.float64)
        if temperature >= 0:
            own += exact_noise(noise_words(key, ids))
        largest = tl.max(own, 0)
        first = tl.min(tl.where(own == largest, ids, vocab_size), 0)
        is_better = (largest > best) | (token < 0)
        best = tl.where(is_better, largest, best)
        token = tl.where(is_better, first, token)
    tl.store(tokens + tl.program_id(0), token.to(tl.int64))


@triton.jit
def least_winning(top):
    """The smallest score in float32 that may be the row's largest in float64; top: the largest in float32."""
    return tl.where(top == float("inf"), top, top - SLACK * (tl.abs(top) + 64.0))
