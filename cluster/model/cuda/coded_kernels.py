"""Triton kernels of products with weights that are codes (`cluster.model.layers.codes` has their layout).
Importing them needs triton; `coded_products` launches them.

A code becomes a number by operations on bits, the same on every GPU:

* An integer is put into the low bits of the float32 of 2**23, from which 2**23 and the zero are subtracted at
  once, exactly.
* E4M3 has the bits of a float16 that is 256 times smaller, E2M1 of one that is 2**14 times smaller, subnormal
  numbers as well. Their scales, numbers or (uint8) exponents, are multiplied by that.

Numbers are exact in bfloat16 and float16, their products are summed in float32, a group of columns is
multiplied by its scale in float32, and the sum is rounded once where it is stored. In `coded_rows`, groups
shorter than a step are scaled before the product, so that a step may have several: these weights are rounded
to the dtype of x. How a sum is cut follows from the matrix alone, so a row's result depends on that row
alone; only `coded_row`, `coded_rows` of 16 rows and of more (on Hopper by another instruction) may sum in
different orders. No GPU has run short groups in this form.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import begin, let_next_begin, wait_for_last

E4M3, NIBBLE, E2M1 = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)  # `CodeKind`
RUN, WORDS = tl.constexpr(128), tl.constexpr(16)  # columns of a run of 4 bit codes, and its words
MAGIC_BITS, MAGIC = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)  # 2**23
E4M3_FACTOR, E2M1_FACTOR = tl.constexpr(256.0), tl.constexpr(16384.0)
LEAST_POWER = tl.constexpr(0x00400000)  # the bits of 2**-127
NO_BIT_14 = tl.constexpr(-0x4001)


@triton.jit
def _codes(numbers, outputs, is_output, first, width, KIND: tl.constexpr, STEP: tl.constexpr):
    """Returns STEP columns from `first` on, [len(outputs), STEP] float32: integers plus 2**23, or E4M3
    divided by 256, or E2M1 by 2**14."""
    if KIND >= NIBBLE:  # of 4 bits
        stride = tl.cdiv(width, RUN) * WORDS
        rows = numbers + outputs.to(tl.int64)[:, None] * stride
        if STEP >= RUN:
            places = first // 8 + tl.arange(0, STEP // 8)
        else:
            places = tl.arange(0, WORDS)
            places += (first + places) // RUN * WORDS
        words = tl.load(rows + places[None, :], mask=is_output[:, None] & (places < stride)[None, :], other=0)
        if STEP >= RUN:
            shifts = tl.arange(0, 8) * 4
            words = tl.reshape(words, [outputs.shape[0], STEP // RUN, 1, WORDS])
            codes = (words >> shifts[None, None, :, None]) & 15
        else:
            shifts = (first + tl.arange(0, STEP // WORDS) * WORDS) % RUN // 4
            codes = (words[:, None, :] >> shifts[None, :, None]) & 15
        codes = tl.reshape(codes, [outputs.shape[0], STEP])
    else:
        columns = first + tl.arange(0, STEP)
        rows = numbers + outputs.to(tl.int64)[:, None] * width
        mask = is_output[:, None] & (columns < width)[None, :]
        codes = tl.load(rows + columns[None, :], mask=mask, other=0)
    if KIND == E4M3:
        # the sign is repeated in two bits, of which the lower one is cleared
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & NO_BIT_14
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == E2M1:
        bits = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.int16)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = (codes.to(tl.int32) | MAGIC_BITS).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _groups(
    scales, zeros, outputs, is_output, first, scale_rows, group, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Scales, and what to subtract from the codes before: of GROUPS groups of GROUP columns from `first` on,
    [len(outputs), GROUPS] float32."""
    groups = (first + tl.arange(0, GROUPS) * GROUP) // group
    places = (outputs // scale_rows).to(tl.int64)[:, None] * num_groups + groups[None, :]
    mask = is_output[:, None] & (groups < num_groups)[None, :]
    if scales.dtype.element_ty == tl.uint8:  # exponents
        power = tl.load(scales + places, mask=mask, other=0).to(tl.int32)
        power = tl.where(power == 0, LEAST_POWER, power << 23)
        scale = power.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + places, mask=mask, other=0.0).to(tl.float32)
    if KIND == E4M3:
        scale *= E4M3_FACTOR
        zero = tl.zeros_like(scale)
    elif KIND == E2M1:
        scale *= E2M1_FACTOR
        zero = tl.zeros_like(scale)
    elif zeros is None:
        zero = tl.zeros_like(scale) + (MAGIC + MIDDLE)
    else:
        stored = tl.load(zeros + places, mask=mask, other=0).to(tl.int32)
        zero = (stored | MAGIC_BITS).to(tl.float32, bitcast=True)
    return scale, zero


@triton.jit
def decoded(
    numbers, scales, zeros, outputs, is_output, first, width, scale_rows, group, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Weights of one step before their scales, [TILE, groups, GROUP] float32, and the scales."""
    groups: tl.constexpr = STEP // GROUP
    codes = _codes(numbers, outputs, is_output, first, width, KIND, STEP)
    scale, zero = _groups(
        scales, zeros, outputs, is_output, first, scale_rows, group, num_groups, KIND, MIDDLE, GROUP, groups
    )
    return tl.reshape(codes, [TILE, groups, GROUP]) - zero[:, :, None], scale[:, :, None]


@triton.jit
def _columns(x, first, end, STEP: tl.constexpr, GROUP: tl.constexpr):
    """[1, groups, GROUP] float32."""
    columns = first + tl.arange(0, STEP)
    own = tl.load(x + columns, mask=columns < end, other=0.0).to(tl.float32)
    return tl.reshape(own, [1, STEP // GROUP, GROUP])


@triton.jit
def coded_row(
    x, numbers, scales, zeros, bias, out,
    num_outputs, width, share_width, scale_rows, group, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), shares). x [width]: one row, without the matrix unit. GROUP columns of a
    step have one scale. A program sums share_width columns, a multiple of STEP. Its first weights are read
    while the kernel before ends."""
    let_next_begin(EARLY)
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    share = tl.program_id(1)
    is_output = outputs < num_outputs
    start = share * share_width
    end = tl.minimum(start + share_width, width)
    codes, scale = decoded(
        numbers, scales, zeros, outputs, is_output, start, width, scale_rows, group, num_groups,
        KIND, MIDDLE, TILE, STEP, GROUP,
    )  # fmt: skip
    wait_for_last(EARLY)
    products = codes * _columns(x, start, end, STEP, GROUP) * scale
    for first in range(start + STEP, end, STEP):
        codes, scale = decoded(
            numbers, scales, zeros, outputs, is_output, first, width, scale_rows, group, num_groups,
            KIND, MIDDLE, TILE, STEP, GROUP,
        )  # fmt: skip
        products += codes * _columns(x, first, end, STEP, GROUP) * scale
    sums = tl.sum(tl.sum(products, 2), 1)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output & (share == 0), other=0.0).to(tl.float32)
    tl.store(out + share * num_outputs + outputs, sums.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_tokens"])
def coded_rows(
    x, numbers, scales, zeros, bias, out,
    num_tokens, num_outputs, width, share_width, scale_rows, group, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    GROUP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), shares, cdiv(num_tokens, ROWS)). x [num_tokens, width]. GROUP columns of
    a step have one scale: if they are all, it multiplies the product of the step."""
    begin(EARLY)
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    share = tl.program_id(1)
    tokens = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_output, is_token = outputs < num_outputs, tokens < num_tokens
    end = tl.minimum((share + 1) * share_width, width)
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(share * share_width, end, STEP):
        columns = first + tl.arange(0, STEP)
        own = tl.load(
            x + tokens.to(tl.int64)[:, None] * width + columns[None, :],
            mask=is_token[:, None] & (columns < end)[None, :],
            other=0.0,
        )
        if GROUP == STEP:
            codes = _codes(numbers, outputs, is_output, first, width, KIND, STEP)
            scale, zero = _groups(
                scales, zeros, outputs, is_output, first, scale_rows, group, num_groups, KIND, MIDDLE, STEP, 1
            )
            factors = (codes - zero).to(x.dtype.element_ty)
            sums += tl.dot(own, tl.trans(factors), input_precision="ieee") * tl.trans(scale)
        else:
            codes, scale = decoded(
                numbers, scales, zeros, outputs, is_output, first, width, scale_rows, group, num_groups,
                KIND, MIDDLE, TILE, STEP, GROUP,
            )  # fmt: skip
            factors = tl.reshape(codes * scale, [TILE, STEP]).to(x.dtype.element_ty)
            sums = tl.dot(own, tl.trans(factors), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output & (share == 0), other=0.0).to(tl.float32)[None, :]
    places = (share * num_tokens + tokens).to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@triton.jit
def plain_weight(
    numbers, scales, zeros, out,
    num_outputs, width, scale_rows, group, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), cdiv(width, STEP)). out [num_outputs, width]: the weight, rounded
    once."""
    groups: tl.constexpr = STEP // GROUP
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_output = outputs < num_outputs
    first = tl.program_id(1) * STEP
    codes = _codes(numbers, outputs, is_output, first, width, KIND, STEP)
    scale, zero = _groups(
        scales, zeros, outputs, is_output, first, scale_rows, group, num_groups, KIND, MIDDLE, GROUP, groups
    )
    weights = (tl.reshape(codes, [TILE, groups, GROUP]) - zero[:, :, None]) * scale[:, :, None]
    columns = first + tl.arange(0, STEP)
    tl.store(
        out + outputs.to(tl.int64)[:, None] * width + columns[None, :],
        tl.reshape(weights, [TILE, STEP]).to(out.dtype.element_ty),
        mask=is_output[:, None] & (columns < width)[None, :],
    )
