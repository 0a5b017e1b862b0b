"""Triton kernels of attention over paged KV for any mix of prompt chunks and answers. Importing them needs
triton; `paged_attention` launches them and says what they compute.

`plan` cuts a step into work items, of which an `attend` program takes every P-th; `merge` joins what the
shares of a token's keys gave. Two lists of items: rows (sequences with few new tokens) and tiles (the
others), one launch of `attend` for each with its own tile sizes.

A token sees the keys [max(0, index - window + 1), end). Key tiles begin at multiples of TILE, shares at
multiples of SHARE_UNIT, and a key tile that a row does not see leaves the row's numbers as they are. So a row
is summed in an order that its own sequence's context and number of new tokens decide, in any company.

Blocks are [num_blocks, BLOCK_SIZE, KV_HEADS, width], contiguous. A head's channels are worked on in runs
(`attention_runs`).

Sizes that differ from step to step are not specialised, so that no step waits for the compiler.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.attention_runs import load_query, run_scores, store_sums, weighted_sums, zero_sums
from cluster.model.cuda.early_kernels import let_next_begin, wait_for_last

LOG2_E = tl.constexpr(1.4426950408889634)
KEYS_PER_SHARE = tl.constexpr(256)
MAX_SHARES = tl.constexpr(32)  # of one token's keys
MAX_PLACES = tl.constexpr(512)  # shares times new tokens of one sequence, if there are several shares
SHARE_UNIT = tl.constexpr(128)  # a share is so many keys, or a multiple; a multiple of every TILE
ITEM_WIDTH = tl.constexpr(8)  # numbers of a work item


@triton.jit
def _share_sizes(context, new, window):
    """How the keys of a sequence's tokens are cut. Returns the number of shares, and the units of a share. Of
    the sequence alone: a window shortens what its tokens see together, and shifts where they begin."""
    seen = tl.minimum(context, new + window - 1)
    units = (seen + SHARE_UNIT - 1) // SHARE_UNIT + tl.where(seen < context, 1, 0)
    shares = tl.minimum((seen + KEYS_PER_SHARE - 1) // KEYS_PER_SHARE, MAX_SHARES)
    shares = tl.maximum(tl.minimum(shares, tl.full((), MAX_PLACES, tl.int32) // tl.maximum(new, 1)), 1)
    share_units = tl.maximum((units + shares - 1) // shares, 1)
    return tl.maximum((units + share_units - 1) // share_units, 1), share_units


@triton.jit(do_not_specialize=["num_seqs", "window", "capacity"])
def plan(
    starts, contexts, indices, ends, rows, items, counts, seq_shares, seq_places, num_seqs, window,
    capacity,
    ROW_TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr, ITEMS: tl.constexpr, SEQS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (cdiv(capacity, ITEMS), 1 or 2): a program finds ITEMS items of one list, 0 rows, 1 tiles. Each
    program counts the items of all sequences again, so none waits for another. A sequence with at most
    ROW_TOKENS new tokens is one row item for each share of its keys; of others TILE_TOKENS tokens are one
    tile.

    items [2, capacity, ITEM_WIDTH]: row of the sequence's table, first token, number of tokens, first key,
    end of the keys, place of the first token's partial result (-1: there is one share only), shares. counts
    [2, 4]: number of items, and padding. seq_shares, seq_places [B]: shares of a token's keys, and the place
    of the first token's first share."""
    # size: two passes over the same numbers, which have no names outside
    wait_for_last(EARLY)
    of_tiles = tl.program_id(1)
    numbers = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    seq = tl.zeros([ITEMS], tl.int32)  # of each item
    first_item = tl.zeros([ITEMS], tl.int32)  # of that sequence
    first_place = tl.zeros([ITEMS], tl.int32)
    num_items = 0
    num_places = 0
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        valid = seqs < num_seqs
        start = tl.load(starts + seqs, mask=valid, other=0)
        new = tl.load(starts + seqs + 1, mask=valid, other=0) - start
        context = tl.load(contexts + seqs, mask=valid, other=0)
        shares, _ = _share_sizes(context, new, window)
        is_tiles = tl.where(new > ROW_TOKENS, 1, 0)
        tiles = tl.where(is_tiles == 1, (new + TILE_TOKENS - 1) // TILE_TOKENS, 1)
        own_items = tl.where((is_tiles == of_tiles) & (new > 0), tiles * shares, 0)
        own_places = tl.where(shares > 1, new * shares, 0)
        item_ends = num_items + tl.cumsum(own_items, 0)
        places = num_places + tl.cumsum(own_places, 0) - own_places
        if tl.program_id(0) + of_tiles == 0:
            tl.store(seq_shares + seqs, shares, mask=valid)
            tl.store(seq_places + seqs, places, mask=valid)
        is_before = (item_ends[None, :] <= numbers[:, None]) & valid[None, :]
        seq += tl.sum(is_before.to(tl.int32), 1)
        first_item = tl.maximum(first_item, tl.max(tl.where(is_before, item_ends[None, :], 0), 1))
        first_place += tl.sum(tl.where(is_before, own_places[None, :], 0), 1)
        num_items += tl.sum(own_items, 0)
        num_places += tl.sum(own_places, 0)
    if tl.program_id(0) == 0:
        tl.store(counts + of_tiles * 4, num_items)
    inside = numbers < num_items
    start = tl.load(starts + seq, mask=inside, other=0)
    new = tl.load(starts + seq + 1, mask=inside, other=0) - start
    context = tl.load(contexts + seq, mask=inside, other=0)
    shares, share_units = _share_sizes(context, new, window)
    tile_tokens = tl.where(new > ROW_TOKENS, TILE_TOKENS, ROW_TOKENS)
    tiles = (new + tile_tokens - 1) // tile_tokens
    # The last tiles of a prompt see the most keys, so they come first.
    first_token = (tiles - 1 - (numbers - first_item) // shares) * tile_tokens
    share = (numbers - first_item) % shares
    num_tokens = tl.minimum(tile_tokens, new - first_token)
    token = start + first_token
    index = tl.load(indices + token, mask=inside, other=0)
    tile_end = tl.load(ends + token + num_tokens - 1, mask=inside, other=0)
    seen_from = tl.maximum(index - window + 1, 0)
    first_key = (seen_from // SHARE_UNIT + share * share_units) * SHARE_UNIT
    end_key = tl.minimum(first_key + share_units * SHARE_UNIT, tile_end)
    place = tl.where(shares > 1, first_place + first_token * shares + share, -1)
    record = items + (of_tiles * capacity + numbers) * ITEM_WIDTH
    tl.store(record, tl.load(rows + seq, mask=inside, other=0), mask=inside)
    tl.store(record + 1, token, mask=inside)
    tl.store(record + 2, num_tokens, mask=inside)
    tl.store(record + 3, tl.maximum(first_key, seen_from), mask=inside)
    tl.store(record + 4, end_key, mask=inside)
    tl.store(record + 5, place, mask=inside)
    tl.store(record + 6, shares, mask=inside)


@triton.jit
def _item(items, number, mask):
    """A work item, as `plan` writes it. Volatile: the first is read beside the count, not behind it."""
    at = items + number * ITEM_WIDTH
    return (
        tl.load(at, mask=mask, volatile=True), tl.load(at + 1, mask=mask, volatile=True),
        tl.load(at + 2, mask=mask, volatile=True), tl.load(at + 3, mask=mask, volatile=True),
        tl.load(at + 4, mask=mask, volatile=True), tl.load(at + 5, mask=mask, volatile=True),
        tl.load(at + 6, mask=mask, volatile=True),
    )  # fmt: skip


@triton.jit
def _tile_blocks(
    table, tile_start, end_key, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """[TILE // UNIT] int32: the blocks of a tile's keys, of which UNIT lie side by side in one. table: of the
    sequence."""
    starts = tile_start + tl.arange(0, TILE // UNIT) * UNIT
    return tl.load(table + starts // BLOCK_SIZE, mask=starts < end_key, other=0)


@triton.jit(do_not_specialize=["window", "table_stride"])
def attend(
    query, key, key_scales, value, value_scales, tables, indices, ends, items, count, sinks, out,
    partial_out, partial_stats,
    scaling, softcap, window, table_stride,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr, K_RUN: tl.constexpr, K_RUNS: tl.constexpr,
    V_WIDTH: tl.constexpr, V_RUN: tl.constexpr, V_RUNS: tl.constexpr,
    TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FACTOR: tl.constexpr, HAS_PTX: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (P, KV_HEADS): a program takes the items p, p + P, … of one list for one KV head. ROWS: the rows
    of a tile, GROUP query heads of each of an item's tokens. A token whose keys are one share is stored
    divided, to `out`; else partial_out [places, heads, V_WIDTH] gets its sums and partial_stats [places,
    heads, 2] the largest score times log2(e) and the sum of exponentials, in float32. key, value, scales and
    HAS_PTX are as `attention_runs` says. FACTOR multiplies INT8 values' scales, and is taken out of the
    result."""
    # size: one loop in another, whose two dozen names each part needs
    wait_for_last(EARLY)
    kv_head = tl.program_id(1)
    dtype: tl.constexpr = query.dtype.element_ty
    # Keys of a block share an address.
    UNIT: tl.constexpr = BLOCK_SIZE if TILE % BLOCK_SIZE == 0 else 1
    PARTS: tl.constexpr = 1 if key_scales is None else 2
    row_numbers = tl.arange(0, ROWS)
    heads = kv_head * GROUP + row_numbers % GROUP
    places = tl.arange(0, TILE) % UNIT * KV_HEADS + kv_head
    num_items = tl.load(count)
    row, first_token, num_tokens, first_key, end_key, place, shares = _item(items, tl.program_id(0), True)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        table, first_tile = tables + row * table_stride, first_key // TILE * TILE
        blocks = _tile_blocks(table, first_tile, end_key, BLOCK_SIZE, TILE, UNIT)
        token_numbers = row_numbers // GROUP
        is_row = token_numbers < num_tokens
        tokens = first_token + token_numbers
        seen_to = tl.minimum(tl.load(ends + tokens, mask=is_row, other=0), end_key)
        seen_from = tl.load(indices + tokens, mask=is_row, other=0) - window + 1
        seen_from = tl.maximum(seen_from, first_key)
        # Every row of the item sees the keys [all_from, all_to).
        all_from = tl.max(tl.where(is_row, seen_from, 0), 0)
        all_to = tl.min(tl.where(is_row, seen_to, end_key), 0)
        rows = tokens.to(tl.int64) * (KV_HEADS * GROUP) + heads
        queries = load_query(query, rows, is_row, K_WIDTH, K_RUN, K_RUNS, PARTS)
        num_keys = tl.maximum(end_key - first_key, 0).to(tl.uint32)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = zero_sums(ROWS, V_RUN // PARTS, V_RUNS * PARTS)
        for tile_start in range(first_tile, end_key, TILE):
            positions = tile_start + tl.arange(0, TILE)
            inside = (positions - first_key).to(tl.uint32) < num_keys  # so none before first_key, either
            firsts = blocks.to(tl.int64) * BLOCK_SIZE
            if UNIT == 1:
                firsts += positions % BLOCK_SIZE
            key_rows = tl.broadcast_to((firsts * KV_HEADS)[:, None], [TILE // UNIT, UNIT])
            key_rows = tl.reshape(key_rows, [TILE])
            blocks = _tile_blocks(table, tile_start + TILE, end_key, BLOCK_SIZE, TILE, UNIT)
            scores = run_scores(
                queries, key, key_scales, key_rows, places, inside, K_WIDTH, K_RUN, K_RUNS, HAS_PTX
            )
            if HAS_SOFTCAP:  # softcap * tanh(scores / softcap)
                scores *= scaling
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1) * LOG2_E
            else:
                scores *= scaling * LOG2_E
            if (tile_start < all_from) | (tile_start + TILE > all_to):
                sees = (positions[None, :] >= seen_from[:, None]) & (positions[None, :] < seen_to[:, None])
                scores = tl.where(sees, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            probs = tl.exp2(scores - shift[:, None])
            correction = tl.exp2(largest - shift)
            total = total * correction + tl.sum(probs, 1)
            largest = new_largest
            sums = weighted_sums(
                sums, correction, probs, value, value_scales, key_rows, places, inside, V_WIDTH, V_RUN,
                V_RUNS, FACTOR, dtype, HAS_PTX,
            )  # fmt: skip
        if place < 0:
            if sinks is not None:
                total += tl.exp2(tl.load(sinks + heads).to(tl.float32) * LOG2_E - largest)
            divisor = tl.where(is_row, total, 1.0) * FACTOR
            store_sums(out, rows, is_row, sums, divisor, V_WIDTH, V_RUN, V_RUNS, PARTS)
        else:
            parts = (place + token_numbers * shares).to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(partial_stats + parts * 2, largest, mask=is_row)
            tl.store(partial_stats + parts * 2 + 1, total, mask=is_row)
            factors = tl.full([ROWS], FACTOR, tl.float32)
            store_sums(partial_out, parts, is_row, sums, factors, V_WIDTH, V_RUN, V_RUNS, PARTS)
        following = number + tl.num_programs(0)
        row, first_token, num_tokens, first_key, end_key, place, shares = _item(
            items, following, following < num_items
        )


@triton.jit
def merge(
    partial_out, partial_stats, seqs, starts, seq_shares, seq_places, sinks, out,
    HEADS: tl.constexpr, MERGED: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr,
    SHARES_PAD: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, cdiv(HEADS, MERGED)). Joins the shares of MERGED heads of one token; stores nothing if there
    is one share. SHARES_PAD is a constant, so that the order of the sum is one, too. A token of no sequence
    becomes zero."""
    let_next_begin(EARLY)
    token, first_head = tl.program_id(0), tl.program_id(1) * MERGED
    seq = tl.load(seqs + token)
    own = tl.maximum(seq, 0)
    num_shares, place = tl.load(seq_shares + own), tl.load(seq_places + own)
    place += (token - tl.load(starts + own)) * num_shares
    wait_for_last(EARLY)
    columns = tl.arange(0, V_PAD)
    inside = columns < V_WIDTH
    target = out + (token.to(tl.int64) * HEADS + first_head) * V_WIDTH
    num_heads = tl.minimum(HEADS - first_head, MERGED)
    if seq < 0:
        for member in range(num_heads):
            zeros = tl.zeros([V_PAD], tl.float32).to(out.dtype.element_ty)
            tl.store(target + member * V_WIDTH + columns, zeros, mask=inside)
    elif num_shares > 1:
        numbers = tl.arange(0, SHARES_PAD)
        is_share = numbers < num_shares
        for member in range(num_heads):
            head = first_head + member
            parts = (place + numbers).to(tl.int64) * HEADS + head
            largest = tl.load(partial_stats + parts * 2, mask=is_share, other=float("-inf"))
            totals = tl.load(partial_stats + parts * 2 + 1, mask=is_share, other=0.0)
            sources = parts[:, None] * V_WIDTH + columns[None, :]
            sums = tl.load(partial_out + sources, mask=is_share[:, None] & inside[None, :], other=0.0)
            top = tl.max(largest, 0)
            weights = tl.exp2(largest - top)
            total = tl.sum(weights * totals, 0)
            if sinks is not None:
                total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
            joined = tl.sum(sums * weights[:, None], 0) / total
            tl.store(target + member * V_WIDTH + columns, joined.to(out.dtype.element_ty), mask=inside)
