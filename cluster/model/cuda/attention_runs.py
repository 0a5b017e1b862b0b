"""Runs of a head's channels, as Triton programs of attention read and multiply them: the part of
`attention_kernels` that knows how K and V lie in memory. Importing them needs triton.

A head of *_WIDTH channels has *_RUNS runs of *_RUN. Plain rows are worked on a run at a time. INT8 rows have
one float16 scale for each run of 64 channels: it multiplies the run's scores (K) or the probabilities (V),
never the elements. Their codes are read as int16, two neighbours in each: matrix units take operands of 16
bits from shared memory with their rows turned, and codes one by one. So a run of INT8 rows has two *parts*,
its even and its odd channels, each with columns of the query and sums of its own. Of plain rows the run is
the only part.

HAS_PTX: whether bfloat16 operands are made by instructions of our own, to the same numbers (`ptx`). Triton's
interpreter has none. No GPU has run INT8 rows in pairs.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda import ptx

UNPACK_CODES = tl.constexpr(ptx.UNPACK_CODES)


@triton.jit
def unpack(pairs, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """pairs: int16, each of two codes. Returns the even and the odd ones as `dtype`."""
    if HAS_PTX:
        dtypes: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(UNPACK_CODES, "=r,=r,r", [pairs], dtypes, is_pure=True, pack=2)
    return pairs.to(tl.int8).to(dtype), (pairs >> 8).to(tl.int8).to(dtype)


@triton.jit
def zero_sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """So many tensors [ROWS, COLUMNS] of float32."""
    one = (tl.zeros([ROWS, COLUMNS], tl.float32),)
    made = ()
    for _ in tl.static_range(COUNT):
        made += one
    return made


@triton.jit
def load_query(
    query, rows, row_mask, WIDTH: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The parts [len(rows), RUN // PARTS] of all runs, in order. rows: int64."""
    loaded = ()
    for number in tl.static_range(RUNS * PARTS):
        columns = _channels(number, RUN, PARTS)
        mask = row_mask[:, None] & (columns < WIDTH)[None, :]
        part = (tl.load(query + rows[:, None] * WIDTH + columns[None, :], mask=mask, other=0),)
        loaded += part
    return loaded


@triton.jit
def run_scores(
    queries, contents, scales, rows, places, row_mask, WIDTH: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """[len(query), len(rows)] float32: products of queries and keys. rows, places: as `_load_keys` says."""
    dtype: tl.constexpr = queries[0].dtype
    for number in tl.static_range(RUNS):
        keys = _load_keys(contents, rows, places, row_mask, number, WIDTH, RUN, scales is not None)
        if scales is None:
            own = tl.dot(queries[number], tl.trans(keys.to(dtype)), input_precision="ieee")
        else:
            even, odd = unpack(keys, dtype, HAS_PTX)
            own = tl.dot(queries[2 * number], tl.trans(even), input_precision="ieee")
            own = tl.dot(queries[2 * number + 1], tl.trans(odd), own, input_precision="ieee")
            own *= _run_scale(scales, rows, places, row_mask, number, RUNS)
        if number == 0:
            scores = own
        else:
            scores += own
    return scores


@triton.jit
def weighted_sums(
    sums, correction, probs, contents, scales, rows, places, row_mask, WIDTH: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr, FACTOR: tl.constexpr, dtype: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """sums: of each part [len(probs), RUN // PARTS] float32. Returns them corrected, plus the values weighted
    by probs (float32) and, if the values have scales, by FACTOR."""
    added = ()
    for number in tl.static_range(RUNS):
        values = _load_keys(contents, rows, places, row_mask, number, WIDTH, RUN, scales is not None)
        if scales is None:
            own = sums[number] * correction[:, None]
            parts = (tl.dot(probs.to(dtype), values.to(dtype), own, input_precision="ieee"),)
        else:
            weights = probs * (_run_scale(scales, rows, places, row_mask, number, RUNS) * FACTOR)
            even, odd = unpack(values, dtype, HAS_PTX)
            parts = (
                tl.dot(
                    weights.to(dtype), even, sums[2 * number] * correction[:, None], input_precision="ieee"
                ),
                tl.dot(
                    weights.to(dtype), odd, sums[2 * number + 1] * correction[:, None], input_precision="ieee"
                ),
            )
        added += parts
    return added


@triton.jit
def store_sums(
    target, rows, row_mask, sums, divisor, WIDTH: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Stores the sums of each part, divided."""
    for number in tl.static_range(RUNS * PARTS):
        columns = _channels(number, RUN, PARTS)
        mask = row_mask[:, None] & (columns < WIDTH)[None, :]
        own = (sums[number] / divisor[:, None]).to(target.dtype.element_ty)
        tl.store(target + rows[:, None] * WIDTH + columns[None, :], own, mask=mask)


@triton.jit
def _channels(number: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr):
    """Those of a part. number: of the part, among those of all runs."""
    return number // PARTS * RUN + number % PARTS + tl.arange(0, RUN // PARTS) * PARTS


@triton.jit
def _load_keys(
    contents, rows, places, row_mask, number: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr,
    IS_PAIRS: tl.constexpr,
):  # fmt: skip
    """[len(rows), RUN] or, if they are pairs of codes, [len(rows), RUN // 2]: one run of the rows `rows` +
    `places`. Keys of one block have equal rows, int64, and places that are the same for every tile, so one
    address serves them."""
    PER_ELEMENT: tl.constexpr = 2 if IS_PAIRS else 1
    columns = number * (RUN // PER_ELEMENT) + tl.arange(0, RUN // PER_ELEMENT)
    mask = row_mask[:, None] & (columns < WIDTH // PER_ELEMENT)[None, :]
    offsets = places[:, None] * (WIDTH // PER_ELEMENT) + columns[None, :]
    return tl.load(contents + (rows * (WIDTH // PER_ELEMENT))[:, None] + offsets, mask=mask, other=0)


@triton.jit
def _run_scale(scales, rows, places, row_mask, number: tl.constexpr, RUNS: tl.constexpr):
    """[1, len(rows)] float32. scales: int32, two in a word; or float16, which are not loaded ahead of their
    use, as the compiler loads ahead nothing smaller than a word."""
    keys = rows + places
    if scales.dtype.element_ty == tl.int32:
        if RUNS % 2 == 0:  # the same word for two runs
            words = tl.load(scales + keys * (RUNS // 2) + number // 2, mask=row_mask, other=0)
            halves = words >> (number % 2 * 16)
        else:
            elements = keys * RUNS + number
            words = tl.load(scales + elements // 2, mask=row_mask, other=0)
            halves = words >> (elements % 2 * 16).to(tl.int32)
        own = halves.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        own = tl.load(scales + keys * RUNS + number, mask=row_mask, other=0.0)
    return own.to(tl.float32)[None, :]
