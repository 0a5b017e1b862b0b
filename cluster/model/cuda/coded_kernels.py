"""Triton kernels of products with weights that are codes (`cluster.model.layers.codes` has their layout).
Importing them needs triton; `coded_products` launches them.

Codes are read as words of 32 bits. Two codes of a word, or of two neighbours, lie in the two halves of one
word while they become numbers, so an instruction works on both; then the halves are numbers of 16 bits, in
the order of their columns. All of it is operations on bits and exact multiplications, the same on every GPU:

* An integer c has the bits of c * 2**-133 in bfloat16, and of c * 2**-24 in float16. These are multiplied by
  2**127, or 2**15, and the zero is subtracted, in that unit.
* E4M3 has the bits of a bfloat16 that is 2**120 times smaller, E2M1 of one that is 2**126 times smaller,
  subnormal numbers as well. In float16 these factors are 2**8 and 2**14, and part of the scale.

The weights are the first operand of the matrix unit, which takes it from registers: numbers that were made
there are not stored again. Their products are summed in float32, a group of columns is multiplied by its
scale in float32, and the sum is rounded once where it is stored. Groups shorter than a step are scaled before
the product, so that a step may have several: these weights are rounded to the dtype of x. How a sum is cut
follows from the matrix alone, so a row's result depends on that row alone; only tiles for one row, for up to
16 and for more may sum in different orders (on Hopper the first are of another instruction). No GPU has run
this form.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import let_next_begin, wait_for_last

E4M3, NIBBLE, E2M1 = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)  # `CodeKind`
RUN, WORDS = tl.constexpr(128), tl.constexpr(16)  # columns of a run of 4 bit codes, and its words
SIGNS, UPPER = tl.constexpr(-0x7FFF8000), tl.constexpr(-0x10000)  # of both halves; the upper half


@triton.jit
def code_words(numbers, outputs, is_output, step, width, KIND: tl.constexpr, STEP: tl.constexpr):
    """Reads the codes of the columns from step * STEP on, [len(outputs), STEP / codes of a word] int32."""
    count: tl.constexpr = STEP // 8 if KIND >= NIBBLE else STEP // 4
    stride = tl.cdiv(width, RUN) * WORDS if KIND >= NIBBLE else width // 4
    places = step * count + tl.arange(0, count)
    rows = numbers + outputs.to(tl.int64)[:, None] * stride
    return tl.load(rows + places[None, :], mask=is_output[:, None] & (places < stride)[None, :], other=0)


@triton.jit
def _by_halves(even, odd):
    """Returns the lower halves of both in one word, then the upper ones: [..., 2]."""
    return tl.join((even & 0xFFFF) | (odd << 16), ((even >> 16) & 0xFFFF) | (odd & UPPER))


@triton.jit
def _times(values, factor):
    """Exact. As float32 would: the compiler makes instructions of it that multiply two numbers of 16 bits."""
    return (values.to(tl.float32) * factor).to(values.dtype)


@triton.jit
def exact_numbers(
    words, zero, KIND: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, dtype: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Numbers of 16 bits that the codes in words [TILE, ...] stand for, less `zero`: [TILE, STEP]. Not REAL:
    in a smaller unit, which `group_scales` has in its scale and zero."""
    mantissa: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    if KIND >= NIBBLE:
        even, odd = tl.split(tl.reshape(words, [TILE, STEP // 16, 2]))
        shifts = (tl.arange(0, 4) * 4)[None, None, None, :]
        pairs = _by_halves(even, odd)[:, :, :, None]
        if KIND == NIBBLE:
            pairs = (pairs >> shifts) & 0x000F000F
        else:
            pairs <<= 12 - shifts
            pairs = (pairs & SIGNS) | ((pairs >> (13 - mantissa)) & (0x00070007 << (mantissa - 1)))
    else:
        if KIND == E4M3:
            even, odd = words << 8, words
            bits: tl.constexpr = 0x007F007F << (mantissa - 3)
            even = (even & SIGNS) | ((even >> (11 - mantissa)) & bits)
            odd = (odd & SIGNS) | ((odd >> (11 - mantissa)) & bits)
        else:
            even, odd = words & 0x00FF00FF, (words >> 8) & 0x00FF00FF
        pairs = _by_halves(even, odd)
    lower = pairs.to(tl.int16).to(dtype, bitcast=True)
    upper = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    values = tl.join(lower, upper)
    if KIND >= NIBBLE:  # words, codes of a word, pairs of words to codes, words
        values = tl.permute(tl.reshape(values, [TILE, STEP // RUN, 8, 8, 2]), (0, 1, 3, 2, 4))
    values = tl.reshape(values, [TILE, STEP])
    if KIND != E4M3 and KIND != E2M1:
        values = _times(values, 2.0**127 if dtype == tl.bfloat16 else 2.0**15)
        values = (values.to(tl.float32) - zero.to(tl.float32)).to(dtype)
        if REAL:
            values = _times(values, 2.0**6 if dtype == tl.bfloat16 else 2.0**9)
    elif dtype == tl.bfloat16:
        values = _times(values, 2.0**120 if KIND == E4M3 else 2.0**126)
    elif REAL:
        values = _times(values, 2.0**8 if KIND == E4M3 else 2.0**14)
    return values


@triton.jit
def group_scales(
    scales, zeros, outputs, is_output, step, scale_rows, run, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of a step's GROUPS parts, of which `run` have one scale: [len(outputs)], or
    [len(outputs), GROUPS] of several. Zeros are of the unit and dtype of `exact_numbers`, scales float32 by
    its unit, or, if REAL, of its dtype."""
    if GROUPS == 1:
        group = step // run
        places = (outputs // scale_rows).to(tl.int64) * num_groups + group
        mask = is_output & (group < num_groups)
    else:
        group = (step * GROUPS + tl.arange(0, GROUPS)) // run
        places = (outputs // scale_rows).to(tl.int64)[:, None] * num_groups + group[None, :]
        mask = is_output[:, None] & (group < num_groups)[None, :]
    unit: tl.constexpr = 2.0**-6 if dtype == tl.bfloat16 else 2.0**-9
    if scales.dtype.element_ty == tl.uint8:  # exponents; 0 is that of 2**-127
        power = tl.load(scales + places, mask=mask, other=0).to(tl.int32)
        if REAL:
            scale = tl.where(power == 0, 0x40, power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            scale = tl.where(power == 0, 0x400000, power << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + places, mask=mask, other=0.0)
    if not REAL:
        scale = scale.to(tl.float32)
        if KIND != E4M3 and KIND != E2M1:
            scale *= 1 / unit
        elif dtype != tl.bfloat16:
            scale *= 2.0**8 if KIND == E4M3 else 2.0**14
    if zeros is None:
        zero = tl.full(places.shape, MIDDLE * unit, tl.float32)
    else:
        zero = tl.load(zeros + places, mask=mask, other=0).to(tl.float32) * unit
    return scale, zero.to(dtype)


@triton.jit
def scaled_numbers(
    words, scale, zero, KIND: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr,
    dtype: tl.constexpr, REAL: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Weights of one step, rounded once to the dtype OUT: [TILE, STEP]. REAL: numbers and scales are of that
    dtype, so that one multiplication of 16 bits rounds as one in float32 and OUT would."""
    scale = scale.to(tl.float32)
    if GROUPS == 1:
        numbers = exact_numbers(words, zero[:, None], KIND, TILE, STEP, dtype, REAL)
        weights = (numbers.to(tl.float32) * scale[:, None]).to(OUT)
    else:
        width: tl.constexpr = STEP // GROUPS
        zero = tl.reshape(tl.broadcast_to(zero[:, :, None], [TILE, GROUPS, width]), [TILE, STEP])
        numbers = exact_numbers(words, zero, KIND, TILE, STEP, dtype, REAL)
        numbers = tl.reshape(numbers, [TILE, GROUPS, width]).to(tl.float32)
        weights = tl.reshape((numbers * scale[:, :, None]).to(OUT), [TILE, STEP])
    return weights


@triton.jit
def _added(
    sums, words, scale, zero, x_rows, is_token, step, width,
    KIND: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """sums [TILE, rows] and the products of one step."""
    columns = step * STEP + tl.arange(0, STEP)
    x = tl.load(x_rows + columns[None, :], mask=is_token[:, None] & (columns < width)[None, :], other=0.0)
    if GROUPS == 1:
        weights = exact_numbers(words, zero[:, None], KIND, TILE, STEP, dtype, REAL).to(x.dtype)
        sums += tl.dot(weights, tl.trans(x), input_precision="ieee") * scale[:, None]
    else:
        weights = scaled_numbers(words, scale, zero, KIND, TILE, STEP, GROUPS, dtype, REAL, x.dtype)
        # added apart: instructions of the matrix unit that add to one sum would wait for each other
        sums = tl.fma(tl.dot(weights, tl.trans(x), input_precision="ieee"), 1.0, sums)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def coded_rows(
    x, numbers, scales, zeros, bias, out,
    num_tokens, num_outputs, width, share_steps, scale_rows, run, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    GROUPS: tl.constexpr, REAL: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), shares, cdiv(num_tokens, ROWS)). x [num_tokens, width]. A program sums
    share_steps steps of STEP columns, of which GROUPS parts have a scale each. Its first weights are read
    while the kernel before ends, and multiplied last."""
    is_half: tl.constexpr = REAL or (GROUPS == 1 and x.dtype.element_ty != tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty if is_half else tl.float16
    let_next_begin(EARLY)
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    share = tl.program_id(1)
    tokens = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_output, is_token = outputs < num_outputs, tokens < num_tokens
    x_rows = x + tokens.to(tl.int64)[:, None] * width
    first = share * share_steps
    end = tl.minimum(first + share_steps, tl.cdiv(width, STEP))
    first_words = code_words(numbers, outputs, is_output, first, width, KIND, STEP)
    first_scale, first_zero = group_scales(
        scales, zeros, outputs, is_output, first, scale_rows, run, num_groups, KIND, MIDDLE, GROUPS, dtype,
        REAL,
    )  # fmt: skip
    if GROUPS > 1:  # weights wait for their scales, so these are read a step ahead
        scale, zero = group_scales(
            scales, zeros, outputs, is_output, first + 1, scale_rows, run, num_groups, KIND, MIDDLE, GROUPS,
            dtype, REAL,
        )  # fmt: skip
    wait_for_last(EARLY)
    sums = tl.zeros([TILE, ROWS], tl.float32)
    for step in range(first + 1, end):
        words = code_words(numbers, outputs, is_output, step, width, KIND, STEP)
        if GROUPS > 1:
            own_scale, own_zero = scale, zero
            scale, zero = group_scales(
                scales, zeros, outputs, is_output, step + 1, scale_rows, run, num_groups, KIND, MIDDLE,
                GROUPS, dtype, REAL,
            )  # fmt: skip
        else:
            own_scale, own_zero = group_scales(
                scales, zeros, outputs, is_output, step, scale_rows, run, num_groups, KIND, MIDDLE, GROUPS,
                dtype, REAL,
            )  # fmt: skip
        sums = _added(
            sums, words, own_scale, own_zero, x_rows, is_token, step, width, KIND, TILE, STEP, GROUPS, dtype,
            REAL,
        )  # fmt: skip
    sums = _added(
        sums, first_words, first_scale, first_zero, x_rows, is_token, first, width, KIND, TILE, STEP, GROUPS,
        dtype, REAL,
    )  # fmt: skip
    sums = tl.trans(sums)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output & (share == 0), other=0.0).to(tl.float32)[None, :]
    places = (share * num_tokens + tokens).to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@triton.jit
def plain_weight(
    numbers, scales, zeros, out,
    num_outputs, width, scale_rows, run, num_groups,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_outputs, TILE), cdiv(width, STEP)). out [num_outputs, width]: the weight, rounded
    once."""
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_output = outputs < num_outputs
    step = tl.program_id(1)
    words = code_words(numbers, outputs, is_output, step, width, KIND, STEP)
    scale, zero = group_scales(
        scales, zeros, outputs, is_output, step, scale_rows, run, num_groups, KIND, MIDDLE, GROUPS,
        tl.float16, REAL,
    )  # fmt: skip
    weights = scaled_numbers(
        words, scale, zero, KIND, TILE, STEP, GROUPS, tl.float16, REAL, out.dtype.element_ty
    )
    columns = step * STEP + tl.arange(0, STEP)
    tl.store(
        out + outputs.to(tl.int64)[:, None] * width + columns[None, :], weights,
        mask=is_output[:, None] & (columns < width)[None, :],
    )  # fmt: skip
