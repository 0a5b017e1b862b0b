"""Triton kernels of products with few tokens: the weights are read once, and that is all that takes time.
Importing them needs triton; `products` launches them.

A program sums share_width columns, a multiple of STEP, for TILE outputs: x [num_tokens, width], weight
[num_outputs, width], out [shares, num_tokens, num_outputs]. The bias belongs to the first share. A row's sums
are in an order of their own.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import let_next_begin, wait_for_last

LINE = tl.constexpr(64)  # numbers of 16 bits that the cache reads at once
# Into the second cache: of no value, and the kernel does not wait.
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def product_row(
    x, weight, bias, out, num_outputs, width, share_width,
    TILE: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), shares). One row, without the matrix unit, which would idle. The first
    weights are read while the kernel before ends."""
    let_next_begin(EARLY)
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    share = tl.program_id(1)
    is_output = outputs < num_outputs
    end = tl.minimum((share + 1) * share_width, width)
    rows = weight + outputs.to(tl.int64)[:, None] * width
    columns = share * share_width + tl.arange(0, STEP)
    inside = columns < end
    factors = tl.load(rows + columns[None, :], mask=is_output[:, None] & inside[None, :], other=0.0)
    wait_for_last(EARLY)
    own = tl.load(x + columns, mask=inside, other=0.0)
    products = factors.to(tl.float32) * own.to(tl.float32)[None, :]
    for first in range(share * share_width + STEP, end, STEP):
        columns = first + tl.arange(0, STEP)
        inside = columns < end
        factors = tl.load(rows + columns[None, :], mask=is_output[:, None] & inside[None, :], other=0.0)
        own = tl.load(x + columns, mask=inside, other=0.0)
        products += factors.to(tl.float32) * own.to(tl.float32)[None, :]
    sums = tl.sum(products, 1)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output & (share == 0), other=0.0).to(tl.float32)
    tl.store(out + share * num_outputs + outputs, sums.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_tokens"])
def product_rows(
    x, weight, bias, out, num_tokens, num_outputs, width, share_width,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), shares). At most ROWS tokens; the first weights as in `product_row`."""
    let_next_begin(EARLY)
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tokens = tl.arange(0, ROWS)
    share = tl.program_id(1)
    is_output, is_token = outputs < num_outputs, tokens < num_tokens
    end = tl.minimum((share + 1) * share_width, width)
    rows = weight + outputs.to(tl.int64)[:, None] * width
    own_rows = x + tokens[:, None] * width
    columns = share * share_width + tl.arange(0, STEP)
    inside = (columns < end)[None, :]
    factors = tl.load(rows + columns[None, :], mask=is_output[:, None] & inside, other=0.0)
    wait_for_last(EARLY)
    own = tl.load(own_rows + columns[None, :], mask=is_token[:, None] & inside, other=0.0)
    sums = tl.dot(own, tl.trans(factors), tl.zeros([ROWS, TILE], tl.float32))
    for first in range(share * share_width + STEP, end, STEP):
        columns = first + tl.arange(0, STEP)
        inside = (columns < end)[None, :]
        factors = tl.load(rows + columns[None, :], mask=is_output[:, None] & inside, other=0.0)
        own = tl.load(own_rows + columns[None, :], mask=is_token[:, None] & inside, other=0.0)
        sums = tl.dot(own, tl.trans(factors), sums)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output & (share == 0), other=0.0).to(tl.float32)[None, :]
    places = (share * num_tokens + tokens)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def product_tile(
    x, weight, bias, out, num_tokens, num_outputs, width, share_width,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), shares). At most ROWS tokens. The weights are the first operand, of
    which matrix units of 9.0 and later take 64 rows at once from shared memory. Its first weights are on
    their way while the kernel before ends."""
    let_next_begin(EARLY)
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tokens = tl.arange(0, ROWS)
    share = tl.program_id(1)
    is_output, is_token = outputs < num_outputs, tokens < num_tokens
    start, end = share * share_width, tl.minimum((share + 1) * share_width, width)
    rows = weight + outputs.to(tl.int64)[:, None] * width
    own_rows = x + tokens[:, None] * width
    if EARLY:
        lines = start + tl.arange(0, 2 * STEP // LINE) * LINE
        ahead = tl.where(is_output[:, None] & (lines < end)[None, :], rows + lines[None, :], weight)
        tl.inline_asm_elementwise(
            PREFETCH, "=r,l", [ahead.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
        wait_for_last(EARLY)
    sums = tl.zeros([TILE, ROWS], tl.float32)
    for first in range(start, end, STEP):
        columns = first + tl.arange(0, STEP)
        inside = (columns < end)[None, :]
        factors = tl.load(rows + columns[None, :], mask=is_output[:, None] & inside, other=0.0)
        own = tl.load(own_rows + columns[None, :], mask=is_token[:, None] & inside, other=0.0)
        sums = tl.dot(factors, tl.trans(own), sums)
    sums = tl.trans(sums)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output & (share == 0), other=0.0).to(tl.float32)[None, :]
    places = (share * num_tokens + tokens)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])
