"""Triton kernels of Kimi's delta attention (Kimi Linear, 2025) for sequences of many tokens: the delta rule
where each channel of a key has a decay of its own. Everything else is `delta_kernels`'. Importing them needs
triton; `kimi` launches them. No GPU has run them.

With G the running sum of a chunk's decays, by channel, A[i, j] = beta[i] times the sum over channels of k[i]
k[j] exp(G[i] - G[j]). exp(-G[j]) alone may be more than a float32 holds, so tokens are taken in blocks of
BLOCK: between blocks, with g the sum at the later one's first token, a product of k[i] exp(G[i] - g) and k[j]
exp(g - G[j]), neither of which grows; within a block, channel by channel.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.delta_kernels import (
    BETA_FACTOR,
    BLOCK,
    EPSILON,
    KEY,
    NUM_FACTORS,
    QUERY,
    betas,
    channel_decays,
)
from cluster.model.cuda.early_kernels import begin
from cluster.model.cuda.mixer_kernels import CHUNK, float_dot


@triton.jit(do_not_specialize=["num_spans"])
def channel_sums(
    rows, mixed, decays, rates, shifts, starts, chunk_spans, chunk_begins, sums, factors,
    row_stride, decay_stride, num_spans,
    HEADS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, B0: tl.constexpr,
    LOWEST: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (chunks, HEADS). sums [chunks, HEADS, CHUNK, K]: G of every token. factors [chunks, HEADS, 5,
    CHUNK]: those of q and k, and beta."""
    begin(EARLY)
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    span = tl.load(chunk_spans + chunk)
    if span < num_spans:
        end = tl.load(starts + span + 1)
        first = tl.load(starts + span) + (chunk - tl.load(chunk_begins + span)) * CHUNK
        width: tl.constexpr = (2 * K + V) * HEADS
        members, keys = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
        tokens = first + members
        is_new, is_key = tokens < end, (keys < K)[None, :]
        mask = is_new[:, None] & is_key
        places = (tokens * width + head * K)[:, None] + keys[None, :]
        q = tl.load(mixed + places, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(mixed + places + HEADS * K, mask=mask, other=0.0).to(tl.float32)
        number = chunk * HEADS + head
        own = factors + number * (NUM_FACTORS * CHUNK) + members
        tl.store(own + QUERY * CHUNK, (1.0 / tl.sqrt(tl.sum(q * q, 1) + EPSILON)) * (1.0 / K**0.5))
        tl.store(own + KEY * CHUNK, 1.0 / tl.sqrt(tl.sum(k * k, 1) + EPSILON))
        tl.store(own + BETA_FACTOR * CHUNK, betas(rows, tokens * row_stride + head, is_new, B0, 1.0))
        shift = tl.load(shifts + head * K + keys, mask=keys < K, other=0.0)[None, :]
        places = (tokens * decay_stride + head * K)[:, None] + keys[None, :]
        decay = channel_decays(decays, places, mask, tl.load(rates + head), shift, LOWEST)
        places = sums + number * (CHUNK * K) + members[:, None] * K + keys[None, :]
        tl.store(places, tl.cumsum(decay, 0), mask=is_key)


@triton.jit(do_not_specialize=["num_spans"])
def channel_systems(
    mixed, sums, factors, starts, chunk_spans, chunk_begins, systems, num_spans,
    HEADS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (chunks, HEADS, CHUNK / BLOCK). systems [chunks, HEADS, 2, CHUNK, CHUNK]: BLOCK rows of A, and of
    what tokens see of corrections. sums, factors: what `channel_sums` gives."""
    begin(EARLY)
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    span = tl.load(chunk_spans + chunk)
    if span < num_spans:
        end = tl.load(starts + span + 1)
        first = tl.load(starts + span) + (chunk - tl.load(chunk_begins + span)) * CHUNK
        width: tl.constexpr = (2 * K + V) * HEADS
        start = tl.program_id(2) * BLOCK
        members, keys = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
        own = start + tl.arange(0, BLOCK)
        number = chunk * HEADS + head
        own_sums, is_key = sums + number * (CHUNK * K) + keys, keys < K
        at_first = tl.load(own_sums + start * K, mask=is_key, other=0.0)[None, :]
        queries = mixed + first * width + head * K + keys
        rows_mask = (first + own < end)[:, None] & is_key[None, :]
        grown = tl.load(own_sums[None, :] + own[:, None] * K, mask=is_key[None, :], other=0.0)
        q = tl.load(queries[None, :] + own[:, None] * width, mask=rows_mask, other=0.0).to(tl.float32)
        places = queries[None, :] + HEADS * K + own[:, None] * width
        k = tl.load(places, mask=rows_mask, other=0.0).to(tl.float32)
        before = (members < start)[:, None] & is_key[None, :]
        fall = tl.load(own_sums[None, :] + members[:, None] * K, mask=before, other=0.0)
        places = queries[None, :] + HEADS * K + members[:, None] * width
        others = tl.load(places, mask=before & (first + members < end)[:, None], other=0.0).to(tl.float32)
        others = tl.trans(others * tl.exp(tl.where(before, at_first - fall, 0.0)))
        falls = tl.exp(grown - at_first)
        system, seen = float_dot(k * falls, others, EXACT), float_dot(q * falls, others, EXACT)
        for index in range(start, start + BLOCK):
            is_there = is_key & (first + index < end)
            other = tl.load(queries + HEADS * K + index * width, mask=is_there, other=0.0).to(tl.float32)
            at = tl.load(own_sums + index * K, mask=is_key, other=0.0)
            after = (own >= index)[:, None]
            other = other[None, :] * tl.exp(tl.where(after, grown - at[None, :], 0.0))
            is_column = (members == index)[None, :]
            system = tl.where(is_column, tl.sum(k * other, 1)[:, None], system)
            seen = tl.where(is_column, tl.sum(q * other, 1)[:, None], seen)
        factor = factors + number * (NUM_FACTORS * CHUNK)
        of_other = tl.load(factor + KEY * CHUNK + members)[None, :]
        of_key, of_query = tl.load(factor + KEY * CHUNK + own), tl.load(factor + QUERY * CHUNK + own)
        system *= (tl.load(factor + BETA_FACTOR * CHUNK + own) * of_key)[:, None] * of_other
        seen *= of_query[:, None] * of_other
        square = systems + number * (2 * CHUNK * CHUNK) + own[:, None] * CHUNK + members[None, :]
        tl.store(square, tl.where(own[:, None] > members[None, :], system, 0.0))
        tl.store(square + CHUNK * CHUNK, tl.where(own[:, None] >= members[None, :], seen, 0.0))
