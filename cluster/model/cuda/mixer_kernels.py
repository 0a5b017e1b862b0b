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

from cluster.model.cuda.early_kernels import begin

LONG = tl.constexpr(16)  # tokens of a sequence that is computed by products
CHUNK = tl.constexpr(64)  # tokens


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
def softplus(x):
    """As torch computes it: log(1 + exp(x)), exact for small exp(x), too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    exact = tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0))
    return tl.where(x > 20.0, x, tl.where(one == 1.0, grown, exact))


@triton.jit
def float_dot(x, y, EXACT: tl.constexpr):
    """By units for products, which cut operands to 11 bits; EXACT: to 21."""
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def state_places(
    pages, rows, row_mask, columns, mask, OFFSET: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Where the elements at these rows and columns of a matrix of WIDTH columns are in the memory of pages,
    and a mask of those that are there."""
    inside = row_mask[:, None] & mask[None, :]
    if PAGE % WIDTH == 0 and OFFSET % WIDTH == 0:  # a row lies in one page
        per_page: tl.constexpr = PAGE // WIDTH
        numbers = OFFSET // WIDTH + rows
        ids = tl.load(pages + numbers // per_page, mask=row_mask, other=-1)
        places = (ids * PAGE + numbers % per_page * WIDTH)[:, None] + columns[None, :]
        return places, inside & (ids >= 0)[:, None]
    else:
        offsets = OFFSET + rows[:, None] * WIDTH + columns[None, :]
        ids = tl.load(pages + offsets // PAGE, mask=inside, other=-1)
        return ids * PAGE + offsets % PAGE, inside & (ids >= 0)


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


@triton.jit(do_not_specialize=["num_tokens", "page_stride", "first_page"])
def convolve(
    rows, weight, bias, memory, source, target, starts, firsts, spans, out,
    num_tokens, row_stride, page_stride, first_page,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, TAPS: tl.constexpr, PAGE: tl.constexpr, Q0: tl.constexpr, K0: tl.constexpr,
    V0: tl.constexpr, KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(T, TOKENS), cdiv(channels, TILE)). out [T, channels]: silu of the convolution. Inputs before
    a sequence's first token are in its state [channels, TAPS]."""
    begin(EARLY)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channels = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    key_width: tl.constexpr = KEY_HEADS * K
    width: tl.constexpr = 2 * key_width + KEY_HEADS * GROUP * V
    span = tl.load(spans + tokens, mask=tokens < num_tokens, other=-1)
    is_token = span >= 0
    first = tl.load(firsts + span, mask=is_token, other=0)
    origin = tl.load(starts + first, mask=is_token, other=0)
    end = tl.load(starts + span + 1, mask=is_token, other=0)
    mask = is_token[:, None] & (channels < width)
    if key_width == K0 - Q0 and key_width == V0 - K0 and KEY_STEP == K and VALUE_STEP == GROUP * V:
        columns = Q0 + channels
    else:
        keys, values = channels % key_width, channels - 2 * key_width
        key_columns = keys // K * KEY_STEP + keys % K
        value_columns = V0 + values // (GROUP * V) * VALUE_STEP + values % (GROUP * V)
        columns = tl.where(channels < key_width, Q0 + key_columns, K0 + key_columns)
        columns = tl.where(channels < 2 * key_width, columns, value_columns)
    total = tl.zeros([TOKENS, TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        at = tokens - (TAPS - 1 - tap)
        is_new = mask & (at >= origin)[:, None]
        x = tl.load(rows + (at * row_stride)[:, None] + columns, mask=is_new, other=0.0).to(tl.float32)
        factor = tl.load(weight + channels * TAPS + tap, mask=channels < width, other=0.0).to(tl.float32)
        total += factor * x
    read = (source + first * page_stride + first_page)[:, None]
    age = tl.where(is_token, tokens - origin, TAPS)
    if tl.min(age, 0) < TAPS - 1:
        for tap in tl.static_range(TAPS - 1):
            before = (age + tap + 1)[:, None]  # of the state's TAPS inputs
            x = load_state(memory, read, channels * TAPS + before, mask & (before < TAPS), PAGE)
            factor = tl.load(weight + channels * TAPS + tap, mask=channels < width, other=0.0).to(tl.float32)
            total += factor * x
    if bias is not None:
        total += tl.load(bias + channels, mask=channels < width, other=0.0).to(tl.float32)
    y = silu(rounded(total, rows.dtype.element_ty), rows.dtype.element_ty)
    tl.store(out + (tokens * width)[:, None] + channels, y.to(out.dtype.element_ty), mask=mask)
    is_last = is_token & (tokens + 1 == end)
    if tl.max(is_last.to(tl.int32), 0) > 0:
        written = (target + span * page_stride + first_page)[:, None]
        keep_inputs(
            rows, memory, read, written, (tokens + 1)[:, None], origin[:, None], channels, columns, columns,
            mask & is_last[:, None], row_stride, TAPS, PAGE, False,
        )  # fmt: skip
