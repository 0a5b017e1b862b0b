"""Triton kernels of the gated delta rule (Yang et al., "Gated Delta Networks", 2024, equation 10), with the
gated norm behind it, as transformers' modules of Qwen3-Next and Qwen3.5 compute them. In front of it is a
convolution (`mixer_kernels.convolve`). Importing them needs triton; `mixers` launches them.

    x = silu(conv(rows)), cut into q, k, v;  q and k are normalised, q is divided by sqrt(K)
    S = S * decay;  S += k outer ((v - kT S) * beta);  out = qT S

`convolve` gives x of all tokens. Columns of S do not depend on each other: a program takes TILE columns of
one head of one sequence through all its new tokens. Sequences of fewer than LONG tokens, so all answers, are
computed token by token (`few_tokens`); longer ones in chunks of CHUNK tokens by products (`many_tokens`). So
an answer's numbers do not depend on prompts in its step.

Within a chunk, with G the running sum of the decays' logarithms, each token's correction of the state depends
on those before it: (I + A) d = beta * (v - exp(G) k S), A[i, j] = beta[i] (k[i] · k[j]) exp(G[i] - G[j]) for
j < i. What does not depend on S is computed for all chunks side by side: A, what each token sees of the
corrections, and factors of tokens (`chunk_systems`), then T = (I + A)^-1 beta (`solve_systems`), in float32,
by rows within blocks of BLOCK tokens as transformers does, and by products between these. Only d = T (v -
exp(G) k S) and its two uses follow one chunk after the other.

Units for products cut operands to 11 bits: q, k and v in bfloat16 have no more. For other models (EXACT) a
product is three of them, which see 21 bits.

Which chunks there are says `mixer_chunks`, on the device; the host knows a bound of their number.

Columns of rows: head h of the keys has q at Q0 + h * KEY_STEP, and k at K0; value head g of key head h has v
at V0 + h * VALUE_STEP + g * V, z at Z0, and beta and decay at B0 + h * GATE_STEP + g, A0. Channels of the
convolution are those of q, then k, then v.
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

EPSILON = tl.constexpr(1e-6)  # under the root of the norms of q and k
BLOCK = tl.constexpr(16)  # tokens: the smallest matrix that units for products take
# numbers of a token in `factors`: of q and k before products with S, of corrections after it, beta, and what
# the chunk leaves of S
QUERY, KEY, _LEFT, BETA_FACTOR, _KEPT = (tl.constexpr(i) for i in range(5))
NUM_FACTORS = tl.constexpr(5)


@triton.jit
def betas(rows, places, mask, B0: tl.constexpr, BETA: tl.constexpr):
    """How much of new values is written."""
    beta = tl.load(rows + places + B0, mask=mask, other=0.0).to(tl.float32)
    beta = rounded(rounded(tl.sigmoid(beta), rows.dtype.element_ty) * BETA, rows.dtype.element_ty)
    return tl.where(mask, beta, 0.0)


@triton.jit
def _decays(rows, places, mask, rate, shift, A0: tl.constexpr):
    """The logarithm of what is kept of old values."""
    decay = tl.load(rows + places + A0, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, rate * softplus(decay + shift), 0.0)


@triton.jit
def channel_decays(decays, places, mask, rate, shift, LOWEST: tl.constexpr):
    """The same where each channel of a key has its own. LOWEST below 0: a bound, which it comes near to by a
    sigmoid, and it is rounded."""
    raw = tl.load(decays + places, mask=mask, other=0.0).to(tl.float32) + shift
    if LOWEST < 0:
        decay = rounded(LOWEST * tl.sigmoid(-rate * raw), decays.dtype.element_ty)
    else:
        decay = rate * softplus(raw)
    return tl.where(mask, decay, 0.0)


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans"])
def few_tokens(
    rows, mixed, decays, rates, shifts, memory, source, target, starts, firsts, out,
    row_stride, decay_stride, page_stride, first_page, num_spans,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr, B0: tl.constexpr, A0: tl.constexpr,
    GATE_STEP: tl.constexpr, BETA: tl.constexpr, LOWEST: tl.constexpr, IS_DECODE: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (S, KEY_HEADS * GROUP, cdiv(V, TILE)). mixed: what `convolve` gives. out [T, KEY_HEADS * GROUP,
    V]. decays [T, heads * K]: of channels; None: a head has one, in rows. IS_DECODE: every span is a sequence
    of one token, or padding. Sequences of LONG tokens and more are left out."""
    begin(EARLY)
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    origin, last = tl.load(starts + sequence).to(tl.int64), sequence
    if tl.load(starts + sequence + 1) > origin:  # else it is padding
        last = sequence + 1 if IS_DECODE else sequence_end(firsts, sequence, num_spans)
    if (last > sequence) & (tl.load(starts + last) - origin < LONG):
        key_head, member = head // GROUP, head % GROUP
        width: tl.constexpr = (2 * K + GROUP * V) * KEY_HEADS
        keys, columns = tl.arange(0, K_PAD), tile * TILE + tl.arange(0, TILE)
        key_mask, mask = keys < K, columns < V
        read = source + sequence * page_stride + first_page
        places, inside = state_places(read, head * K + keys, keys < K, columns, mask, OFFSET, V, PAGE)
        state = tl.load(memory + places, mask=inside, other=0.0)
        rate = tl.load(rates + head)
        if decays is None:
            shift = tl.load(shifts + head)
        else:
            shift = tl.load(shifts + head * K + keys, mask=key_mask, other=0.0)
        for span in range(sequence, last):
            start, end = tl.load(starts + span).to(tl.int64), tl.load(starts + span + 1).to(tl.int64)
            for token in range(start, end):
                place = mixed + token * width + key_head * K + keys
                q = tl.load(place, mask=key_mask, other=0.0).to(tl.float32)
                k = tl.load(place + KEY_HEADS * K, mask=key_mask, other=0.0).to(tl.float32)
                place = mixed + token * width + 2 * KEY_HEADS * K + head * V + columns
                v = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                q = q * (1.0 / tl.sqrt(tl.sum(q * q, 0) + EPSILON)) * (1.0 / K**0.5)
                k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + EPSILON))
                place = token * row_stride + key_head * GATE_STEP + member
                beta = betas(rows, place, place >= 0, B0, BETA)
                if decays is None:
                    state *= tl.exp(_decays(rows, place, place >= 0, rate, shift, A0))
                else:
                    place = token * decay_stride + head * K + keys
                    state *= tl.exp(channel_decays(decays, place, key_mask, rate, shift, LOWEST))[:, None]
                delta = (v - tl.sum(state * k[:, None], 0)) * beta
                state += k[:, None] * delta[None, :]
                answer = tl.sum(state * q[:, None], 0)
                target_row = (token * (KEY_HEADS * GROUP) + head) * V
                tl.store(out + target_row + columns, answer.to(out.dtype.element_ty), mask=mask)
            written = target + span * page_stride + first_page
            places, inside = state_places(
                written, head * K + keys, keys < K, columns, mask, OFFSET, V, PAGE
            )  # fmt: skip
            tl.store(memory + places, state, mask=inside)


@triton.jit(do_not_specialize=["num_spans"])
def chunk_systems(
    rows, mixed, rates, shifts, starts, chunk_spans, chunk_begins, systems, factors, row_stride, num_spans,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    B0: tl.constexpr, A0: tl.constexpr, GATE_STEP: tl.constexpr, BETA: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (chunks, cdiv(KEY_HEADS * GROUP, HEADS)). systems [chunks, heads, 2, CHUNK, CHUNK]: A, and what
    tokens see of corrections. factors [chunks, heads, 5, CHUNK]."""
    begin(EARLY)
    chunk = tl.program_id(0).to(tl.int64)
    span = tl.load(chunk_spans + chunk)
    if span < num_spans:
        end = tl.load(starts + span + 1)
        first = tl.load(starts + span) + (chunk - tl.load(chunk_begins + span)) * CHUNK
        heads: tl.constexpr = KEY_HEADS * GROUP
        width: tl.constexpr = (2 * K + GROUP * V) * KEY_HEADS
        members, keys = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
        tokens = first + members
        is_new = tokens < end
        sees = members[:, None] >= members[None, :]
        first_head = tl.program_id(1) * HEADS
        for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
            key_head, member = head // GROUP, head % GROUP
            places = mixed + tokens[:, None] * width + key_head * K + keys[None, :]
            key_mask = is_new[:, None] & (keys < K)[None, :]
            q = tl.load(places, mask=key_mask, other=0.0).to(tl.float32)
            k = tl.load(places + KEY_HEADS * K, mask=key_mask, other=0.0).to(tl.float32)
            query_scale = (1.0 / tl.sqrt(tl.sum(q * q, 1) + EPSILON)) * (1.0 / K**0.5)
            key_scale = 1.0 / tl.sqrt(tl.sum(k * k, 1) + EPSILON)
            rate, shift = tl.load(rates + head), tl.load(shifts + head)
            gates = tokens * row_stride + key_head * GATE_STEP + member
            beta = betas(rows, gates, is_new, B0, BETA)
            decay = _decays(rows, gates, is_new, rate, shift, A0)
            sums, total = tl.cumsum(decay, 0), tl.sum(decay, 0)
            number = chunk * heads + head
            own = factors + number * (NUM_FACTORS * CHUNK) + members
            tl.store(own + QUERY * CHUNK, query_scale * tl.exp(sums))
            tl.store(own + KEY * CHUNK, key_scale * tl.exp(sums))
            tl.store(own + _LEFT * CHUNK, key_scale * tl.exp(total - sums))
            tl.store(own + BETA_FACTOR * CHUNK, beta)
            tl.store(own + _KEPT * CHUNK, tl.exp(total + tl.zeros([CHUNK], tl.float32)))
            fall = tl.exp(tl.where(sees, sums[:, None] - sums[None, :], 0.0)) * key_scale[None, :]
            system = float_dot(k, tl.trans(k), EXACT) * fall * (beta * key_scale)[:, None]
            system = tl.where(members[:, None] > members[None, :], system, 0.0)
            seen = tl.where(sees, float_dot(q, tl.trans(k), EXACT) * fall * query_scale[:, None], 0.0)
            squares = systems + number * (2 * CHUNK * CHUNK) + members[:, None] * CHUNK + members[None, :]
            tl.store(squares, system)
            tl.store(squares + CHUNK * CHUNK, seen)


@triton.jit
def _product(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _part(blocks, number: tl.constexpr):
    """One of blocks [4, BLOCK, BLOCK]."""
    is_it = (tl.arange(0, CHUNK // BLOCK) == number)[:, None, None]
    return tl.sum(tl.where(is_it, blocks, 0.0), 0)


@triton.jit
def _solve(matrix, beta):
    """matrix [CHUNK, CHUNK], beta [CHUNK]."""
    parts, members = tl.arange(0, CHUNK // BLOCK), tl.arange(0, BLOCK)
    places = matrix + members[:, None] * CHUNK + members[None, :]
    diagonal = places[None, :, :] + (parts * (BLOCK * CHUNK + BLOCK))[:, None, None]
    blocks = tl.load(diagonal)
    unit = tl.where(members[:, None] == members[None, :], 1.0, 0.0)
    inverse = tl.broadcast_to(unit[None, :, :], blocks.shape)
    for row in range(1, BLOCK):
        is_row = (members == row)[None, :, None]
        of_row = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        solved = tl.sum(of_row[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - solved[:, None, :], inverse)
    t0, t1, t2, t3 = _part(inverse, 0), _part(inverse, 1), _part(inverse, 2), _part(inverse, 3)
    down: tl.constexpr = BLOCK * CHUNK
    a10 = tl.load(places + down)
    a20, a21 = tl.load(places + 2 * down), tl.load(places + 2 * down + BLOCK)
    a30, a31 = tl.load(places + 3 * down), tl.load(places + 3 * down + BLOCK)
    a32 = tl.load(places + 3 * down + 2 * BLOCK)
    t10, t21, t32 = (
        -_product(t1, _product(a10, t0)),
        -_product(t2, _product(a21, t1)),
        -_product(t3, _product(a32, t2)),
    )
    t20 = -_product(t2, _product(a20, t0) + _product(a21, t10))
    t31 = -_product(t3, _product(a31, t1) + _product(a32, t21))
    t30 = -_product(t3, _product(a30, t0) + _product(a31, t10) + _product(a32, t20))
    own = beta + members[None, :]
    b0, b1, b2, b3 = tl.load(own), tl.load(own + BLOCK), tl.load(own + 2 * BLOCK), tl.load(own + 3 * BLOCK)
    tl.store(places, t0 * b0)
    tl.store(places + down, t10 * b0)
    tl.store(places + 2 * down, t20 * b0)
    tl.store(places + 3 * down, t30 * b0)
    tl.store(places + down + BLOCK, t1 * b1)
    tl.store(places + 2 * down + BLOCK, t21 * b1)
    tl.store(places + 3 * down + BLOCK, t31 * b1)
    tl.store(places + 2 * down + 2 * BLOCK, t2 * b2)
    tl.store(places + 3 * down + 2 * BLOCK, t32 * b2)
    tl.store(places + 3 * down + 3 * BLOCK, t3 * b3)


@triton.jit(do_not_specialize=["num_spans"])
def solve_systems(systems, factors, chunk_spans, num_spans, EARLY: tl.constexpr = False):
    """Grid (chunks, heads). A becomes (I + A)^-1 beta."""
    begin(EARLY)
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(chunk_spans + chunk) < num_spans:
        number = chunk * tl.num_programs(1) + head
        _solve(
            systems + number * (2 * CHUNK * CHUNK),
            factors + number * (NUM_FACTORS * CHUNK) + BETA_FACTOR * CHUNK,
        )


@triton.jit
def _after_chunk(
    state, mixed, sums, systems, factors, out, first, end, chunk, head, columns, mask,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Writes the answers of a chunk's tokens from `first` on; returns the state after them. What is scaled
    by channels is loaded again where it is needed again: all of it does not fit into registers."""
    width: tl.constexpr = (2 * K + GROUP * V) * KEY_HEADS
    heads: tl.constexpr = KEY_HEADS * GROUP
    members, keys = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
    square = members[:, None] * CHUNK + members[None, :]
    is_lower = members[:, None] >= members[None, :]
    tokens = first.to(tl.int64) + members
    is_new = tokens < end
    own_rows = mixed + tokens[:, None] * width
    key_places = own_rows + head // GROUP * K + keys[None, :]
    key_mask = is_new[:, None] & (keys < K)[None, :]
    k = tl.load(key_places + KEY_HEADS * K, mask=key_mask, other=0.0)
    value_places = own_rows + 2 * KEY_HEADS * K + head * V + columns[None, :]
    value_mask = is_new[:, None] & mask[None, :]
    v = tl.load(value_places, mask=value_mask, other=0.0).to(tl.float32)
    number = chunk * heads + head
    matrix = systems + number * (2 * CHUNK * CHUNK) + square
    solver = tl.load(matrix, mask=is_lower, other=0.0)
    own = factors + number * (NUM_FACTORS * CHUNK)
    of_query = tl.load(own + QUERY * CHUNK + members)
    of_key = tl.load(own + KEY * CHUNK + members)
    own_sums, grown = sums, k
    if sums is not None:
        own_sums = sums + (number * CHUNK + members[:, None]) * K + keys[None, :]
        grown = k * tl.exp(tl.load(own_sums, mask=key_mask, other=0.0))
    delta = float_dot(solver, v - of_key[:, None] * float_dot(grown, state, EXACT), EXACT)
    q = tl.load(key_places, mask=key_mask, other=0.0)
    if sums is not None:
        q = q * tl.exp(tl.load(own_sums, mask=key_mask, other=0.0))
    seen = tl.load(matrix + CHUNK * CHUNK)
    answer = of_query[:, None] * float_dot(q, state, EXACT) + float_dot(seen, delta, EXACT)
    answer_places = out + (tokens[:, None] * heads + head) * V + columns[None, :]
    tl.store(answer_places, answer.to(out.dtype.element_ty), mask=value_mask)
    if sums is None:
        left = tl.load(own + _LEFT * CHUNK + members)
        kept = tl.load(own + _KEPT * CHUNK)
    else:
        total = tl.load(sums + (number * CHUNK + CHUNK - 1) * K + keys, mask=keys < K, other=0.0)
        k = tl.load(key_places + KEY_HEADS * K, mask=key_mask, other=0.0)
        k = k * tl.exp(total[None, :] - tl.load(own_sums, mask=key_mask, other=0.0))
        left, kept = of_key, tl.exp(total)[:, None]
    return state * kept + float_dot(tl.trans(k), left[:, None] * delta, EXACT)


@triton.jit(do_not_specialize=["page_stride", "first_page", "num_spans", "num_sequences"])
def many_tokens(
    mixed, sums, systems, factors, memory, source, target, starts, firsts, chunk_begins, sequences, out,
    page_stride, first_page, num_spans, num_sequences,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (programs, KEY_HEADS * GROUP, cdiv(V, TILE)): a program computes every so many-th sequence. mixed:
    what `convolve` gives; systems, factors: what `solve_systems` leaves; sums: what `channel_sums` gives,
    None where a head has one decay."""
    begin(EARLY)
    head, tile = tl.program_id(1), tl.program_id(2)
    for rank in range(tl.program_id(0), num_sequences, tl.num_programs(0)):
        sequence = tl.load(sequences + rank)
        if sequence < num_spans:
            last = sequence_end(firsts, sequence, num_spans)
            keys, columns = tl.arange(0, K_PAD), tile * TILE + tl.arange(0, TILE)
            mask = columns < V
            read = source + sequence * page_stride + first_page
            places, inside = state_places(read, head * K + keys, keys < K, columns, mask, OFFSET, V, PAGE)
            state = tl.load(memory + places, mask=inside, other=0.0)
            for span in range(sequence, last):
                start, end = tl.load(starts + span), tl.load(starts + span + 1)
                first_chunk = tl.load(chunk_begins + span)
                for index in range(tl.cdiv(end - start, CHUNK)):
                    state = _after_chunk(
                        state, mixed, sums, systems, factors, out, start + index * CHUNK, end,
                        first_chunk + index, head, columns, mask, KEY_HEADS, GROUP, K, K_PAD, V, EXACT,
                    )  # fmt: skip
                written = target + span * page_stride + first_page
                places, inside = state_places(
                    written, head * K + keys, keys < K, columns, mask, OFFSET, V, PAGE
                )  # fmt: skip
                tl.store(memory + places, state, mask=inside)


@triton.jit
def gated_norm(
    x, rows, weight, out, row_stride, epsilon,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, V: tl.constexpr, PAD: tl.constexpr,
    Z0: tl.constexpr, VALUE_STEP: tl.constexpr, IS_SIGMOID: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, cdiv(HEADS, TILE)). x [T, HEADS, V], normed, times weight [V], times silu(z), or the sigmoid,
    where nothing is rounded in between. out as x. The weight is read while the kernel before ends."""
    let_next_begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    columns = tl.arange(0, PAD)[None, :]
    factors = tl.load(weight + columns, mask=columns < V, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    mask = (heads < HEADS) & (columns < V)
    place = (token * HEADS + heads) * V + columns
    numbers = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    gates = token * row_stride + Z0 + heads // GROUP * VALUE_STEP + heads % GROUP * V + columns
    z = tl.load(rows + gates, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 1) / V + epsilon)
    if IS_SIGMOID:
        numbers = numbers * scale[:, None] * factors
    else:
        numbers = rounded(numbers * scale[:, None], x.dtype.element_ty)
        numbers = rounded(numbers * factors, weight.dtype.element_ty)
    numbers *= tl.sigmoid(z) if IS_SIGMOID else z / (1.0 + tl.exp(-z))
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=mask)
