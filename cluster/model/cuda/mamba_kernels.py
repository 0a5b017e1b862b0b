"""Triton kernels of Mamba 2's state space (Dao and Gu, "Transformers are SSMs", 2024) and of the gated norm
behind it, as transformers' modules of Bamba, Nemotron-H, Granite and Falcon-H1 compute them. In front of it
is a convolution (`mixer_kernels.convolve`). Importing them needs triton; `mamba` launches them. No GPU has
run them.

    x, B, C = silu(conv(rows));  dt = softplus(row + shift), for a head;  rate < 0, skip: of a head
    S = S * exp(dt * rate);  S += dt * x outer B;  out = S C + skip * x

S [P, N] of a head; B and C are those of the head's group. Rows of S do not depend on each other: a program
takes TILE of them, of one head of one sequence, through all its new tokens. Sequences of fewer than LONG
tokens, so all answers, are computed token by token (`few_tokens`); longer ones in chunks of CHUNK tokens by
products (`many_tokens`). So an answer's numbers do not depend on prompts in its step.

Within a chunk, with G the running sum of dt * rate: out[i] = exp(G[i]) S C[i] + the sum over j <= i of
(C[i] · B[j]) exp(G[i] - G[j]) dt[j] x[j]. C · B, G and dt do not depend on S and are computed for all
chunks side by side (`chunk_scores`).

Units for products multiply bfloat16 exactly, so a float32 number times a bfloat16 one is two products, of the
number's first 8 and next 8 bits. For other models (EXACT) a product is three, which see 21 bits.

dt is kept within limits, but not of a piece of one token that follows others: transformers does so.

Columns of mixed: x of all heads, B of all groups, C.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.early_kernels import begin, let_next_begin, wait_for_last
from cluster.model.cuda.mixer_kernels import (
    CHUNK,
    LONG,
    float_dot,
    rounded,
    sequence_end,
    softplus,
    state_places,
)

STEP = tl.constexpr(64)  # of N, of a step of `chunk_scores`
_SUM, _TIME = (tl.constexpr(i) for i in range(2))  # numbers of a token in `factors`: G and dt
_NUM_FACTORS = tl.constexpr(2)


@triton.jit
def _dot(x, y, EXACT: tl.constexpr):
    """Either may be float32; the other one's numbers, or both, are of the model's dtype."""
    if EXACT or x.dtype == y.dtype:
        if x.dtype == tl.bfloat16:
            return tl.dot(x, y)
        return float_dot(x, y, EXACT)
    elif x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, y, acc=tl.dot(low, y))
    else:
        high = y.to(tl.bfloat16)
        low = (y - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x, high, acc=tl.dot(x, low))


@triton.jit
def _time(raw, shift, is_limited, low, high, dtype: tl.constexpr):
    """dt, rounded as the modules round it. raw, shift: float32, values of `dtype`."""
    time = rounded(softplus(rounded(raw + shift, dtype)), dtype)
    return tl.where(is_limited, tl.minimum(tl.maximum(time, low), high), time)


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans"])
def few_tokens(
    rows, mixed, rates, shifts, skips, memory, source, target, starts, firsts, out,
    row_stride, page_stride, first_page, num_spans, low, high,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr, T0: tl.constexpr, IS_DECODE: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (S, GROUPS * GROUP, cdiv(P, TILE)). rows [T, row_stride]: dt of head h in column T0 + h. out [T,
    GROUPS * GROUP, P]. IS_DECODE: every span is a sequence of one token, or padding. Sequences of LONG tokens
    and more are left out."""
    begin(EARLY)
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    origin, last = tl.load(starts + sequence).to(tl.int64), sequence
    if tl.load(starts + sequence + 1) > origin:  # else it is padding
        last = sequence + 1 if IS_DECODE else sequence_end(firsts, sequence, num_spans)
    if (last > sequence) & (tl.load(starts + last) - origin < LONG):
        heads: tl.constexpr = GROUPS * GROUP
        width: tl.constexpr = heads * P + 2 * GROUPS * N
        numbers, own = tl.arange(0, N_PAD), tile * TILE + tl.arange(0, TILE)
        inside, mask = numbers < N, own < P
        read = source + sequence * page_stride + first_page
        is_later = tl.load(read) >= 0  # tokens before have left a state
        places, kept = state_places(read, head * P + own, mask, numbers, inside, OFFSET, N, PAGE)
        state = tl.load(memory + places, mask=kept, other=0.0)
        rate, shift, skip = tl.load(rates + head), tl.load(shifts + head), tl.load(skips + head)
        for span in range(sequence, last):
            start, end = tl.load(starts + span).to(tl.int64), tl.load(starts + span + 1).to(tl.int64)
            is_limited = (end - start > 1) | ((span == sequence) & (not is_later))
            for token in range(start, end):
                place = mixed + token * width + head * P + own
                x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                place = mixed + token * width + heads * P + head // GROUP * N + numbers
                b = tl.load(place, mask=inside, other=0.0).to(tl.float32)
                c = tl.load(place + GROUPS * N, mask=inside, other=0.0).to(tl.float32)
                raw = tl.load(rows + token * row_stride + T0 + head).to(tl.float32)
                time = _time(raw, shift, is_limited, low, high, rows.dtype.element_ty)
                state = state * tl.exp(time * rate) + (time * x)[:, None] * b[None, :]
                answer = tl.sum(state * c[None, :], 1) + skip * x
                place = out + (token * heads + head) * P + own
                tl.store(place, answer.to(out.dtype.element_ty), mask=mask)
            written = target + span * page_stride + first_page
            places, kept = state_places(written, head * P + own, mask, numbers, inside, OFFSET, N, PAGE)
            tl.store(memory + places, state, mask=kept)


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans"])
def chunk_scores(
    rows, mixed, rates, shifts, source, starts, firsts, chunk_spans, chunk_begins, scores, factors,
    row_stride, page_stride, first_page, num_spans, low, high,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T0: tl.constexpr,
    EXACT: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (chunks, cdiv(heads, HEADS)). scores [chunks, GROUPS, CHUNK, CHUNK]: C · B of every token with
    every token, by the program of the group's first head. factors [chunks, heads, 2, CHUNK]."""
    begin(EARLY)
    chunk = tl.program_id(0).to(tl.int64)
    span = tl.load(chunk_spans + chunk)
    if span < num_spans:
        start, end = tl.load(starts + span), tl.load(starts + span + 1)
        first = start + (chunk - tl.load(chunk_begins + span)) * CHUNK
        heads: tl.constexpr = GROUPS * GROUP
        width: tl.constexpr = heads * P + 2 * GROUPS * N
        members = tl.arange(0, CHUNK)
        tokens = first + members
        is_new = tokens < end
        first_head = tl.program_id(1) * HEADS
        own = first_head + tl.arange(0, HEADS)
        is_head = own < heads
        is_later = (tl.load(firsts + span) != span) | (tl.load(source + span * page_stride + first_page) >= 0)
        is_limited = (end - start > 1) | (not is_later)
        mask = is_head[:, None] & is_new[None, :]
        places = (tokens * row_stride)[None, :] + (T0 + own)[:, None]
        raw = tl.load(rows + places, mask=mask, other=0.0).to(tl.float32)
        rate = tl.load(rates + own, mask=is_head, other=0.0)[:, None]
        shift = tl.load(shifts + own, mask=is_head, other=0.0)[:, None]
        time = _time(raw, shift, is_limited, low, high, rows.dtype.element_ty)
        time = tl.where(mask, time, 0.0)
        kept = factors + ((chunk * heads + own) * (_NUM_FACTORS * CHUNK))[:, None] + members[None, :]
        tl.store(kept + _SUM * CHUNK, tl.cumsum(time * rate, 1), mask=is_head[:, None])
        tl.store(kept + _TIME * CHUNK, time, mask=is_head[:, None])
        last_group = tl.minimum((first_head + HEADS + GROUP - 1) // GROUP, GROUPS)
        for group in range((first_head + GROUP - 1) // GROUP, last_group):
            total = tl.zeros([CHUNK, CHUNK], tl.float32)
            for column in range(0, N, STEP):
                numbers = column + tl.arange(0, STEP)
                inside = is_new[:, None] & (numbers < N)[None, :]
                place = mixed + (tokens * width)[:, None] + (heads * P + group * N + numbers)[None, :]
                b = tl.load(place, mask=inside, other=0.0)
                c = tl.load(place + GROUPS * N, mask=inside, other=0.0)
                total += _dot(c, tl.trans(b), EXACT)
            square = members[:, None] * CHUNK + members[None, :]
            tl.store(scores + (chunk * GROUPS + group) * (CHUNK * CHUNK) + square, total)


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans", "num_sequences"])
def many_tokens(
    mixed, skips, scores, factors, memory, source, target, starts, firsts, chunk_begins, sequences, out,
    page_stride, first_page, num_spans, num_sequences,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (programs, GROUPS * GROUP, cdiv(P, TILE)): a program computes every so many-th sequence. scores,
    factors: what `chunk_scores` gives."""
    begin(EARLY)
    head, tile = tl.program_id(1), tl.program_id(2)
    for rank in range(tl.program_id(0), num_sequences, tl.num_programs(0)):
        sequence = tl.load(sequences + rank)
        if sequence < num_spans:
            last = sequence_end(firsts, sequence, num_spans)
            heads: tl.constexpr = GROUPS * GROUP
            width: tl.constexpr = heads * P + 2 * GROUPS * N
            members, numbers = tl.arange(0, CHUNK), tl.arange(0, N_PAD)
            own = tile * TILE + tl.arange(0, TILE)
            inside, mask = numbers < N, own < P
            read = source + sequence * page_stride + first_page
            places, kept = state_places(read, head * P + own, mask, numbers, inside, OFFSET, N, PAGE)
            state = tl.load(memory + places, mask=kept, other=0.0)
            square = members[:, None] * CHUNK + members[None, :]
            sees = members[:, None] >= members[None, :]
            skip = tl.load(skips + head)
            for span in range(sequence, last):
                start, end = tl.load(starts + span), tl.load(starts + span + 1)
                first_chunk = tl.load(chunk_begins + span)
                for index in range(tl.cdiv(end - start, CHUNK)):
                    tokens = (start + index * CHUNK).to(tl.int64) + members
                    is_new = tokens < end
                    own_rows = mixed + (tokens * width)[:, None]
                    x_mask = is_new[:, None] & mask[None, :]
                    x = tl.load(own_rows + (head * P + own)[None, :], mask=x_mask, other=0.0)
                    place = own_rows + (heads * P + head // GROUP * N + numbers)[None, :]
                    b = tl.load(place, mask=is_new[:, None] & inside[None, :], other=0.0)
                    c = tl.load(place + GROUPS * N, mask=is_new[:, None] & inside[None, :], other=0.0)
                    number = first_chunk + index
                    factor = factors + (number * heads + head) * (_NUM_FACTORS * CHUNK)
                    sums = tl.load(factor + _SUM * CHUNK + members)
                    time = tl.load(factor + _TIME * CHUNK + members)
                    total = tl.load(factor + _SUM * CHUNK + CHUNK - 1)
                    score = tl.load(scores + (number * GROUPS + head // GROUP) * (CHUNK * CHUNK) + square)
                    fall = tl.exp(tl.where(sees, sums[:, None] - sums[None, :], 0.0)) * time[None, :]
                    score = tl.where(sees, score * fall, 0.0)
                    answer = tl.exp(sums)[:, None] * _dot(c, tl.trans(state), EXACT)
                    answer += _dot(score, x, EXACT) + skip * x.to(tl.float32)
                    place = out + ((tokens * heads + head) * P)[:, None] + own[None, :]
                    tl.store(place, answer.to(out.dtype.element_ty), mask=x_mask)
                    left = x.to(tl.float32) * (tl.exp(total - sums) * time)[:, None]
                    state = state * tl.exp(total) + _dot(tl.trans(left), b, EXACT)
                written = target + span * page_stride + first_page
                places, kept = state_places(written, head * P + own, mask, numbers, inside, OFFSET, N, PAGE)
                tl.store(memory + places, state, mask=kept)


@triton.jit
def gated_norm(
    x, rows, weight, out, row_stride, epsilon,
    WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr, PAD: tl.constexpr, NORM_FIRST: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, cdiv(WIDTH, GROUP_WIDTH)). x [T, WIDTH], gated by the first WIDTH columns of rows, before or
    after it is normed in groups; weight None: it is not normed. out as x. The weight is read while the kernel
    before ends."""
    let_next_begin(EARLY)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tl.arange(0, PAD)
    columns = group * GROUP_WIDTH + own
    mask = (own < GROUP_WIDTH) & (columns < WIDTH)
    if weight is not None:
        factors = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    numbers = tl.load(x + token * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(rows + token * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z))
    if not NORM_FIRST:
        numbers *= gate
    if weight is not None:
        numbers *= 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / GROUP_WIDTH + epsilon)
        numbers *= factors
    if NORM_FIRST:
        numbers *= gate
    tl.store(out + token * WIDTH + columns, numbers.to(out.dtype.element_ty), mask=mask)
