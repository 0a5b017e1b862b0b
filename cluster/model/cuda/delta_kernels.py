"""Triton kernels of the gated delta rule (Yang et al., "Gated Delta Networks", 2024, equation 10), with the
convolution in front of it and the gated norm behind it, as transformers' modules of Qwen3-Next and Qwen3.5
compute them. Importing them needs triton; `mixers` launches them.

    x = silu(conv(rows)), cut into q, k, v;  q and k are normalised, q is divided by sqrt(K)
    S = S * decay;  S += k outer ((v - kT S) * beta);  out = qT S

Columns of S do not depend on each other: a program takes TILE columns of one head of one sequence through all
its new tokens. Sequences of fewer than LONG tokens, so all answers, are computed token by token
(`few_tokens`, which convolves on its way); longer ones in chunks of LONG tokens by products (`convolve`,
`many_tokens`). So an answer's numbers do not depend on prompts in its step.

Within a chunk, with G the running sum of the decays' logarithms, each token's correction of the state depends
on those before it: (I + A) d = beta * (v - exp(G) k S), A[i, j] = beta[i] (k[i] · k[j]) exp(G[i] - G[j]) for
j < i. The triangular system is solved row by row, in float32, as transformers does.

Columns of rows: head h of the keys has q at Q0 + h * KEY_STEP, and k at K0; value head g of key head h has v
at V0 + h * VALUE_STEP + g * V, z at Z0, and beta and decay at B0 + h * GATE_STEP + g, A0. Channels of the
convolution are those of q, then k, then v.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.mixer_kernels import (
    convolved,
    keep_inputs,
    load_state,
    rounded,
    sequence_end,
    silu,
    store_state,
)

EPSILON = tl.constexpr(1e-6)  # under the root of the norms of q and k
LONG = tl.constexpr(16)  # tokens: the smallest matrix that units for products take


@triton.jit
def _softplus(x):
    """As torch computes it: log(1 + exp(x)), exact for small exp(x), too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    exact = tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0))
    return tl.where(x > 20.0, x, tl.where(one == 1.0, grown, exact))


@triton.jit
def _gates(rows, places, mask, rate, shift, B0: tl.constexpr, A0: tl.constexpr, BETA: tl.constexpr):
    """How much of new values is written, and the logarithm of what is kept of the old ones."""
    beta = tl.load(rows + places + B0, mask=mask, other=0.0).to(tl.float32)
    beta = rounded(rounded(tl.sigmoid(beta), rows.dtype.element_ty) * BETA, rows.dtype.element_ty)
    decay = tl.load(rows + places + A0, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, beta, 0.0), tl.where(mask, rate * _softplus(decay + shift), 0.0)


@triton.jit
def _state_offsets(
    head, columns, mask, OFFSET: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr
):
    """Elements of S [K_PAD, TILE] in a layer's states."""
    keys = tl.arange(0, K_PAD)
    offsets = OFFSET + (head * K + keys)[:, None] * V + columns[None, :]
    return offsets, (keys < K)[:, None] & mask[None, :]


@triton.jit
def _mixed(
    rows, weight, memory, pages, token, begin, channels, columns, mask, row_stride, TAPS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Channels of one token's q, k or v."""
    y = convolved(
        rows, weight, None, memory, pages, token, begin, channels, columns, columns, mask, row_stride, TAPS,
        PAGE, False,
    )  # fmt: skip
    return silu(y, rows.dtype.element_ty)


@triton.jit
def _keep(
    rows, memory, read, written, end, begin, channels, columns, mask, row_stride, TAPS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    keep_inputs(
        rows, memory, read, written, end, begin, channels, columns, columns, mask, row_stride, TAPS, PAGE,
        False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans"])
def few_tokens(
    rows, weight, rates, shifts, conv_memory, delta_memory, source, target, starts, firsts, out,
    row_stride, page_stride, first_page, num_spans,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr, TAPS: tl.constexpr, CONV_PAGE: tl.constexpr, DELTA_PAGE: tl.constexpr,
    DELTA_OFFSET: tl.constexpr, Q0: tl.constexpr, K0: tl.constexpr, V0: tl.constexpr, B0: tl.constexpr,
    A0: tl.constexpr, KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, GATE_STEP: tl.constexpr,
    BETA: tl.constexpr, HAS_LONG: tl.constexpr,
):  # fmt: skip
    """Grid (S, KEY_HEADS * GROUP, cdiv(V, TILE)). out [T, KEY_HEADS * GROUP, V]. HAS_LONG: there may be
    sequences of LONG tokens and more, which are left out."""
    # size: one launch, whose registers no other function may hold
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = sequence_end(firsts, sequence, num_spans)
    begin = tl.load(starts + sequence).to(tl.int64)
    count = tl.load(starts + last) - begin
    is_own = (last > sequence) & (count > 0)
    if HAS_LONG:
        is_own = is_own & (count < LONG)
    if is_own:
        key_head, member = head // GROUP, head % GROUP
        keys, columns = tl.arange(0, K_PAD), tile * TILE + tl.arange(0, TILE)
        key_mask, mask = keys < K, columns < V
        q_columns, k_columns = Q0 + key_head * KEY_STEP + keys, K0 + key_head * KEY_STEP + keys
        v_columns = V0 + key_head * VALUE_STEP + member * V + columns
        q_channels = key_head * K + keys
        k_channels, v_channels = KEY_HEADS * K + q_channels, 2 * KEY_HEADS * K + head * V + columns
        read = source + sequence * page_stride + first_page
        rate, shift = tl.load(rates + head), tl.load(shifts + head)
        offsets, inside = _state_offsets(head, columns, mask, DELTA_OFFSET, K, K_PAD, V)
        state = load_state(delta_memory, read, offsets, inside, DELTA_PAGE)
        for span in range(sequence, last):
            start, end = tl.load(starts + span).to(tl.int64), tl.load(starts + span + 1).to(tl.int64)
            for index in range(end - start):
                token = start + index
                q = _mixed(
                    rows, weight, conv_memory, read, token, begin, q_channels, q_columns, key_mask,
                    row_stride, TAPS, CONV_PAGE,
                )  # fmt: skip
                k = _mixed(
                    rows, weight, conv_memory, read, token, begin, k_channels, k_columns, key_mask,
                    row_stride, TAPS, CONV_PAGE,
                )  # fmt: skip
                v = _mixed(
                    rows, weight, conv_memory, read, token, begin, v_channels, v_columns, mask, row_stride,
                    TAPS, CONV_PAGE,
                )  # fmt: skip
                q = q * (1.0 / tl.sqrt(tl.sum(q * q, 0) + EPSILON)) * (1.0 / K**0.5)
                k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + EPSILON))
                place = token * row_stride + key_head * GATE_STEP + member
                beta, decay = _gates(rows, place, place >= 0, rate, shift, B0, A0, BETA)
                state *= tl.exp(decay)
                delta = (v - tl.sum(state * k[:, None], 0)) * beta
                state += k[:, None] * delta[None, :]
                answer = tl.sum(state * q[:, None], 0)
                target_row = (token * (KEY_HEADS * GROUP) + head) * V
                tl.store(out + target_row + columns, answer.to(out.dtype.element_ty), mask=mask)
            written = target + span * page_stride + first_page
            store_state(delta_memory, written, offsets, state, inside, DELTA_PAGE)
            _keep(
                rows, conv_memory, read, written, end, begin, v_channels, v_columns, mask, row_stride, TAPS,
                CONV_PAGE,
            )  # fmt: skip
            if (member == 0) & (tile == 0):
                _keep(
                    rows, conv_memory, read, written, end, begin, q_channels, q_columns, key_mask, row_stride,
                    TAPS, CONV_PAGE,
                )  # fmt: skip
                _keep(
                    rows, conv_memory, read, written, end, begin, k_channels, k_columns, key_mask, row_stride,
                    TAPS, CONV_PAGE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans"])
def convolve(
    rows, weight, memory, source, target, starts, firsts, spans, out,
    row_stride, page_stride, first_page, num_spans,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
    TAPS: tl.constexpr, PAGE: tl.constexpr, Q0: tl.constexpr, K0: tl.constexpr, V0: tl.constexpr,
    KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr,
):  # fmt: skip
    """Grid (T, cdiv(channels, TILE)). Tokens of sequences of LONG tokens and more: out [T, channels] is silu
    of the convolution."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    key_width: tl.constexpr = KEY_HEADS * K
    width: tl.constexpr = 2 * key_width + KEY_HEADS * GROUP * V
    mask = channels < width
    span = tl.load(spans + token)
    first = tl.load(firsts + tl.maximum(span, 0))
    begin = tl.load(starts + first)
    last = sequence_end(firsts, first, num_spans)
    if (span >= 0) & (tl.load(starts + last) - begin >= LONG):
        keys, values = channels % key_width, channels - 2 * key_width
        key_columns = keys // K * KEY_STEP + keys % K
        value_columns = V0 + values // (GROUP * V) * VALUE_STEP + values % (GROUP * V)
        columns = tl.where(channels < key_width, Q0 + key_columns, K0 + key_columns)
        columns = tl.where(channels < 2 * key_width, columns, value_columns)
        read = source + first * page_stride + first_page
        y = _mixed(rows, weight, memory, read, token, begin, channels, columns, mask, row_stride, TAPS, PAGE)
        tl.store(out + token * width + channels, y.to(out.dtype.element_ty), mask=mask)
        if token + 1 == tl.load(starts + span + 1):
            written = target + span * page_stride + first_page
            _keep(
                rows, memory, read, written, token + 1, begin, channels, columns, mask, row_stride, TAPS, PAGE
            )


@triton.jit
def _corrections(k, values, beta, sums):
    """Solves (I + A) d = values, values [LONG, TILE]: the corrections of the chunk's tokens."""
    members = tl.arange(0, LONG)
    is_before = members[:, None] > members[None, :]
    fall = tl.where(is_before, sums[:, None] - sums[None, :], 0.0)
    system = tl.dot(k, tl.trans(k), input_precision="ieee") * tl.exp(fall) * beta[:, None]
    system = tl.where(is_before, system, 0.0)
    inverse = tl.where(members[:, None] == members[None, :], 1.0, 0.0)
    for row in range(1, LONG):
        is_row = members == row
        factors = tl.sum(tl.where(is_row[:, None], system, 0.0), 0)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(is_row[:, None], inverse - solved[None, :], inverse)
    return tl.dot(inverse, values, input_precision="ieee")


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans"])
def many_tokens(
    rows, mixed, rates, shifts, memory, source, target, starts, firsts, out,
    row_stride, page_stride, first_page, num_spans,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr, B0: tl.constexpr, A0: tl.constexpr,
    GATE_STEP: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """Grid (S, KEY_HEADS * GROUP, cdiv(V, TILE)). mixed: what `convolve` gives."""
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = sequence_end(firsts, sequence, num_spans)
    begin = tl.load(starts + sequence).to(tl.int64)
    if (last > sequence) & (tl.load(starts + last) - begin >= LONG):
        key_head, member = head // GROUP, head % GROUP
        width: tl.constexpr = (2 * K + GROUP * V) * KEY_HEADS
        members, keys = tl.arange(0, LONG), tl.arange(0, K_PAD)
        columns = tile * TILE + tl.arange(0, TILE)
        read = source + sequence * page_stride + first_page
        rate, shift = tl.load(rates + head), tl.load(shifts + head)
        offsets, inside = _state_offsets(head, columns, columns < V, OFFSET, K, K_PAD, V)
        state = load_state(memory, read, offsets, inside, PAGE)
        sees = members[:, None] >= members[None, :]
        for span in range(sequence, last):
            start, end = tl.load(starts + span).to(tl.int64), tl.load(starts + span + 1).to(tl.int64)
            for first in range(0, end - start, LONG):
                tokens = start + first + members
                is_new = tokens < end
                places = tokens[:, None] * width + key_head * K + keys[None, :]
                key_mask = is_new[:, None] & (keys < K)[None, :]
                q = tl.load(mixed + places, mask=key_mask, other=0.0).to(tl.float32)
                k = tl.load(mixed + places + KEY_HEADS * K, mask=key_mask, other=0.0).to(tl.float32)
                q = q * ((1.0 / tl.sqrt(tl.sum(q * q, 1) + EPSILON)) * (1.0 / K**0.5))[:, None]
                k = k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + EPSILON))[:, None]
                value_mask = is_new[:, None] & (columns < V)[None, :]
                places = tokens[:, None] * width + 2 * KEY_HEADS * K + head * V + columns[None, :]
                v = tl.load(mixed + places, mask=value_mask, other=0.0).to(tl.float32)
                gates = tokens * row_stride + key_head * GATE_STEP + member
                beta, decay = _gates(rows, gates, is_new, rate, shift, B0, A0, BETA)
                sums = tl.cumsum(decay, 0)
                total = tl.sum(decay, 0)
                grown = tl.exp(sums)[:, None]
                values = (v - tl.dot(k * grown, state, input_precision="ieee")) * beta[:, None]
                delta = _corrections(k, values, beta, sums)
                fall = tl.where(sees, sums[:, None] - sums[None, :], 0.0)
                seen = tl.dot(q, tl.trans(k), input_precision="ieee") * tl.exp(fall)
                answer = tl.dot(q * grown, state, input_precision="ieee")
                answer += tl.dot(tl.where(sees, seen, 0.0), delta, input_precision="ieee")
                places = (tokens[:, None] * (KEY_HEADS * GROUP) + head) * V + columns[None, :]
                tl.store(out + places, answer.to(out.dtype.element_ty), mask=value_mask)
                left = tl.exp(total - sums)[:, None]
                state = state * tl.exp(total) + tl.dot(tl.trans(k * left), delta, input_precision="ieee")
            written = target + span * page_stride + first_page
            store_state(memory, written, offsets, state, inside, PAGE)


@triton.jit
def gated_norm(
    x, rows, weight, out, row_stride, epsilon,
    GROUP: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, PAD: tl.constexpr, Z0: tl.constexpr,
    VALUE_STEP: tl.constexpr,
):  # fmt: skip
    """Grid (T, HEADS). x [T, HEADS, V], normed, times weight [V], times silu(z). out as x."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, PAD)
    mask = columns < V
    place = (token * HEADS + head) * V + columns
    numbers = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / V + epsilon)
    numbers = rounded(numbers * scale, x.dtype.element_ty)
    factors = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    numbers = rounded(numbers * factors, weight.dtype.element_ty)
    gates = token * row_stride + Z0 + head // GROUP * VALUE_STEP + head % GROUP * V + columns
    z = tl.load(rows + gates, mask=mask, other=0.0).to(tl.float32)
    numbers = numbers * (z / (1.0 + tl.exp(-z)))
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=mask)
