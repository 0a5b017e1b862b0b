"""Triton kernels of mixers that keep states, which they read from the pages where these lie and write into
those where they shall lie (`cluster.model.states`): nothing is copied. Importing them needs triton;
`mixers` launches them and says what they compute.

Tables are those of `SpanTensors`: a program finds its sequence's tokens, and the spans after which a state is
kept, on the device, so one launch serves all sequences of a step, whatever their lengths. A page id of -1
stands for no state: zeros are read, nothing is written. PAGE is a page's size in elements of the memory it
belongs to. Sums and the states of the delta rule are float32; a value is rounded to the model's dtype where
transformers' modules round it. What a sequence gets depends on that sequence alone.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def rounded(numbers, dtype: tl.constexpr):
    """numbers float32, rounded to `dtype`, as float32."""
    return numbers.to(dtype).to(tl.float32)


@triton.jit
def silu(x, dtype: tl.constexpr):
    """x float32, a value of `dtype`; so is the result."""
    return rounded(x / (1.0 + tl.exp(-x)), dtype)


@triton.jit
def load_state(memory, pages, offsets, mask, PAGE: tl.constexpr):
    """Elements at these offsets of a layer's states, float32."""
    ids = tl.load(pages + offsets // PAGE, mask=mask, other=-1)
    return tl.load(memory + ids * PAGE + offsets % PAGE, mask=mask & (ids >= 0), other=0.0).to(tl.float32)


@triton.jit
def store_state(memory, pages, offsets, numbers, mask, PAGE: tl.constexpr):
    ids = tl.load(pages + offsets // PAGE, mask=mask, other=-1)
    numbers = numbers.to(memory.dtype.element_ty)
    tl.store(memory + ids * PAGE + offsets % PAGE, numbers, mask=mask & (ids >= 0))


@triton.jit
def _input(rows, at, columns, factor_columns, mask, GATED: tl.constexpr):
    """What the convolution takes of token `at`: its columns of rows, or their product with others (GATED)."""
    x = tl.load(rows + at + columns, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        factors = tl.load(rows + at + factor_columns, mask=mask, other=0.0).to(tl.float32)
        x = rounded(x * factors, rows.dtype.element_ty)
    return x


@triton.jit
def convolved(
    rows, weight, bias, memory, pages, token, begin, channels, columns, factor_columns, mask, row_stride,
    TAPS: tl.constexpr, PAGE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The convolution's output for one token, rounded. begin: the sequence's first token; inputs before it
    are in its state [channels, TAPS]."""
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap)
        is_new = at >= begin
        x = _input(rows, at * row_stride, columns, factor_columns, mask & is_new, GATED)
        before = tl.minimum(TAPS + at - begin, TAPS - 1)
        x += load_state(memory, pages, channels * TAPS + before, mask & (at < begin), PAGE)
        total += tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0).to(tl.float32) * x
    if bias is not None:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    return rounded(total, rows.dtype.element_ty)


@triton.jit
def keep_inputs(
    rows, memory, source, target, end, begin, channels, columns, factor_columns, mask, row_stride,
    TAPS: tl.constexpr, PAGE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Writes the state of the convolution before token `end`: the last TAPS inputs."""
    for tap in tl.static_range(TAPS):
        at = end - (TAPS - tap)
        is_new = at >= begin
        x = _input(rows, at * row_stride, columns, factor_columns, mask & is_new, GATED)
        before = tl.minimum(TAPS + at - begin, TAPS - 1)
        x += load_state(memory, source, channels * TAPS + before, mask & (at < begin), PAGE)
        store_state(memory, target, channels * TAPS + tap, x, mask, PAGE)


@triton.jit
def sequence_end(firsts, sequence, num_spans):
    """Returns `last`: the spans [sequence, last) are those of the sequence that begins with this span. There
    are none if it is a later span of one."""
    last = sequence
    while tl.load(firsts + last, mask=last < num_spans, other=-1) == sequence:
        last += 1
    return last


@triton.jit(do_not_specialize=["page_stride", "first_page"])
def short_convolution(
    rows, weight, bias, memory, source, target, starts, firsts, spans, out,
    row_stride, page_stride, first_page,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (T, cdiv(WIDTH, TILE)). rows [T, 3 * WIDTH]: B, C and x of each token. out [T, WIDTH]: C times the
    convolution of B * x."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = channels < WIDTH
    span = tl.load(spans + token)
    if span >= 0:
        first = tl.load(firsts + span)
        begin = tl.load(starts + first)
        read = source + first * page_stride + first_page
        columns = channels + 2 * WIDTH
        y = convolved(
            rows, weight, bias, memory, read, token, begin, channels, columns, channels, mask, row_stride,
            TAPS, PAGE, True,
        )  # fmt: skip
        place = token * row_stride
        factors = tl.load(rows + place + WIDTH + channels, mask=mask, other=0.0).to(tl.float32)
        result = (y * factors).to(out.dtype.element_ty)
        tl.store(out + token * WIDTH + channels, result, mask=mask)
        if token + 1 == tl.load(starts + span + 1):
            written = target + span * page_stride + first_page
            keep_inputs(
                rows, memory, read, written, token + 1, begin, channels, columns, channels, mask, row_stride,
                TAPS, PAGE, True,
            )  # fmt: skip
