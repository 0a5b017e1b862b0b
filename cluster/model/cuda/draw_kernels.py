"""Triton kernels that draw tokens by the formula of `cluster.model.sampling`. Importing them needs triton;
`draw` launches them.

The noise of a token is two logarithms of 64-bit numbers, and hardly any token can win. So the first kernel
finds, for each tile of a row, its largest score in float32, and the second computes exactly only the tiles
whose largest score is within the error of the row's. Equal scores go to the smaller token id, as by `argmax`,
NaN is above everything, and infinity is the largest number.

A record of three int64 describes a row: its index in the logits, its key, and its temperature as the bits of
a float32. A negative temperature has no noise: the draw is greedy.
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


@triton.jit
def _words(key, ids):
    """[len(ids)] int64: the 53 random bits of each token."""
    word = key.to(tl.uint64) + (ids + 1).to(tl.uint64) * GAMMA
    word = (word ^ (word >> 30)) * MIX_1
    word = (word ^ (word >> 27)) * MIX_2
    return ((word ^ (word >> 31)) >> 11).to(tl.int64)


@triton.jit
def _noise(words):
    """Standard Gumbel noise in float64."""
    largest = tl.full((), 1.0, tl.float64) - STEP  # as a constant it would be a float32, and 1
    uniform = tl.minimum((words.to(tl.float64) + 0.5) * STEP, largest)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _quick_noise(words):
    """Standard Gumbel noise in float32. Where u is near 1, -log(u) is taken from 1 - u, which keeps its
    digits: with t = (1 - u) / (1 + u), -log(u) = 2 artanh(t), whose series is cut behind t^13 (t ≤ 1/3)."""
    below = (words.to(tl.float32) + 0.5) * STEP
    above = ((9007199254740991 - words).to(tl.float32) + 0.5) * STEP
    t = above / (2.0 - above)
    t2 = t * t
    series = 1 / 9 + t2 * (1 / 11 + t2 * (1 / 13))
    series = 1.0 + t2 * (1 / 3 + t2 * (1 / 5 + t2 * (1 / 7 + t2 * series)))
    return -tl.log(tl.where(above < 0.5, 2.0 * t * series, -tl.log(below)))


@triton.jit
def _scaled(logits, ids, mask, temperature):
    """The logits over the temperature, float32. Infinity is the largest number; NaN becomes infinity."""
    own = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    own = tl.where(temperature < 0, own, tl.div_rn(own, tl.where(temperature < 0, 1.0, temperature)))
    return tl.where(own != own, float("inf"), tl.minimum(own, LARGEST))


@triton.jit
def _row(logits, records, row_stride):
    """The row of this program: where its logits begin, its key and its temperature."""
    record = records + 3 * tl.program_id(0)
    temperature = tl.load(record + 2).to(tl.int32).to(tl.float32, bitcast=True)
    return logits + tl.load(record) * row_stride, tl.load(record + 1), temperature


@triton.jit
def tile_scores(logits, records, scores, row_stride, vocab_size, TILE: tl.constexpr):
    """Grid (rows, tiles). scores [rows, tiles] float32: the largest of each tile."""
    row, key, temperature = _row(logits, records, row_stride)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = _scaled(row, ids, ids < vocab_size, temperature)
    if temperature >= 0:
        own += _quick_noise(_words(key, ids))
    tl.store(scores + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(own, 0))


@triton.jit
def draw_rows(
    logits, records, scores, tokens, row_stride, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). tokens [rows] int64. `scores`: of `tile_scores`. TILES_PAD: num_tiles rounded up to a
    power of two."""
    row, key, temperature = _row(logits, records, row_stride)
    tiles = tl.arange(0, TILES_PAD)
    found = tl.load(
        scores + tl.program_id(0) * num_tiles + tiles, mask=tiles < num_tiles, other=-float("inf")
    )
    most = tl.max(found, 0)
    floor = tl.where(most == float("inf"), most, most - SLACK * (tl.abs(most) + 64.0))
    waiting = ((found >= floor) & (tiles < num_tiles)).to(tl.int32)
    best, token = tl.full((), -float("inf"), tl.float64), tl.full((), -1, tl.int32)
    for _ in range(tl.sum(waiting, 0)):
        tile = tl.min(tl.where(waiting > 0, tiles, TILES_PAD), 0)
        waiting = tl.where(tiles == tile, 0, waiting)
        ids = tile * TILE + tl.arange(0, TILE)
        own = _scaled(row, ids, ids < vocab_size, temperature).to(tl.float64)
        if temperature >= 0:
            own += _noise(_words(key, ids))
        largest = tl.max(own, 0)
        first = tl.min(tl.where(own == largest, ids, vocab_size), 0)
        is_better = (largest > best) | (token < 0)
        best = tl.where(is_better, largest, best)
        token = tl.where(is_better, first, token)
    tl.store(tokens + tl.program_id(0), token.to(tl.int64))
