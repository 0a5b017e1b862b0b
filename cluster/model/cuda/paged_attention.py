"""Launches the attention kernel over paged KV (`attention_kernels`) for any mix of prompt chunks and answers:
causal, with windows, with media spans whose positions see each other, soft caps, sinks, and plain or INT8 KV.

    step_of         what the kernels know of a step, on the device
    plan            once a step and distinct window: cuts the step into work items, on the device
    attend          once a layer: one launch for each list of items, then the shares are merged

Grids and scratch follow from the sizes T and B of the step's tensors alone, never from contexts, so all of it
can be recorded in a CUDA graph; a token of no sequence and a sequence without new tokens are padding. A step
whose sizes are on the host gets scratch for its own partial results only. Nothing synchronises. Scratch is
allocated by each call (from the graph's pool, if one is recorded), so nothing is owned. Needs triton, which
the first call imports; enqueues on the current stream.

A row's bits depend on its own sequence: its tokens of this step, its context and the window. float32 products
are exact ones (`ieee`); in 16 bits, scores and sums are float32 and probabilities are rounded before they
meet the values, as flash-attn does. Letters as in `attention`, and M blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache as cached

import numpy as np
import torch
from torch import Tensor

from cluster.model.attention import LayerAttention, PagedBatch, StepTensors
from cluster.model.batches import step_numbers
from cluster.model.cuda.early import early
from cluster.model.cuda.tiles import power_of_two, tensors_of
from cluster.model.cuda.uploads import upload_as_they_are
from cluster.model.kv_format import GROUP_WIDTH, LayerCache

MAX_WIDTH = 256  # channels of a head that fit a program's registers
MAX_SHARES = 32  # of one token's keys, as in `attention_kernels`
MAX_PLACES = 512  # of one sequence, as there
KEYS_PER_SHARE = 256  # as there
RECORDED_PLACES = MAX_SHARES * 512  # partial results of a step whose sizes are on the device
_ITEM_WIDTH = 8
_ITEMS_PER_PROGRAM = 128
# Of `plan`: more sequences at once take a thread all its registers, and a row of barriers.
_SEQS_PER_PASS, _PLAN_WARPS = 32, 8
_SMALLEST_TILE = 16  # rows that matrix units take
_MERGED_HEADS = 4  # that a program of `merge` joins, in steps whose tokens have one share as a rule
_REGISTERS = 255  # of a thread, at most
_WARP_REGISTERS = 65536 // 32  # of a multiprocessor, for each thread of a warp
# Of Triton's loop: a tile is loaded when the one before has been computed; with three while it is, into
# twice the memory.
_STAGES, _NARROW_STAGES = 2, 3
_NO_WINDOW = 1 << 30
# Of the scales of float16 values: probability times scale may be below float16's normal range. No scale is
# above 516, so no product with the factor is above its range.
_HALF_FACTOR = 64.0


@dataclass(frozen=True)
class Tiles:
    """How a model's heads are cut; constants of the model and its KV format."""

    group: int  # query heads that share a KV head
    row_tile: int  # rows of a tile, for sequences with few new tokens: tokens * group
    prompt_tile: int  # the same for others
    row_keys: int  # keys of an inner step
    prompt_keys: int
    row_warps: int
    prompt_warps: int
    row_stages: int
    row_programs: int  # of a multiprocessor at once; more would begin when the first have ended
    prompt_programs: int
    key_run: tuple[int, int]  # channels that are worked on at once, and how often
    value_run: tuple[int, int]

    @property
    def row_registers(self) -> int:
        """The most that a thread may take if `row_programs` shall fit; they are given out by eights."""
        return min(_WARP_REGISTERS // (self.row_warps * self.row_programs) // 8 * 8, _REGISTERS)

    @property
    def row_tokens(self) -> int:
        return self.row_tile // self.group

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_tile // self.group


@dataclass(frozen=True)
class AttentionPlan:
    """The work of a step for all layers with one window. On the device, int32; valid for that step."""

    window: int
    items: Tensor  # [2, capacity, 8]: as `attention_kernels.plan` says; of rows, then of prompt tiles
    counts: Tensor  # [2, 4]: of items, and padding
    seq_shares: Tensor  # [B] and padding: shares of the keys of a sequence's tokens
    seq_places: Tensor  # [B] and padding: where the partial results of its first token begin
    num_places: int  # at least so many as the step's partial results


def can_attend(cache: LayerCache) -> bool:
    """Codes of INT8 KV are read in pairs."""
    widths = cache.key.row_shape[1], cache.value.row_shape[1]
    is_quantised = tensors_of(cache.key)[1] is not None
    return max(widths) <= MAX_WIDTH and not (is_quantised and any(width % 2 for width in widths))


def step_of(batch: PagedBatch, window: int | None) -> StepTensors:
    """The step's own tensors, if it came with some; else made once a step from the sizes on the host. As
    layers with this window see the step's spans."""
    if ("step",) not in batch.memo:
        batch.memo["step",] = step_tensors(batch) if batch.device is None else batch.device
    step = batch.memo["step",]
    if window is not None or not _hides_spans(batch, step):
        return step
    if ("causal step",) not in batch.memo:
        # those of padding stay 0
        ends = torch.minimum(step.ends, step.indices + 1)
        batch.memo["causal step",] = replace(step, ends=ends)
    return batch.memo["causal step",]


def _hides_spans(batch: PagedBatch, step: StepTensors) -> bool:
    """Whether layers without a window see less than `step.ends` says. A recorded step may have spans."""
    if not batch.windowed_spans or step.is_decode:
        return False
    return batch.device is not None or any(batch.bidirectional_spans)


def plan_of(batch: PagedBatch, tiles: Tiles, window: int | None) -> AttentionPlan:
    """`plan`, made once a step."""
    key = ("plan", tiles, window)
    if key not in batch.memo:
        places = None
        if batch.device is None:
            places = max(1, num_places(batch.query_lens, batch.context_lens))
        batch.memo[key] = plan(step_of(batch, window), tiles, window, places)
    return batch.memo[key]


def step_tensors(batch: PagedBatch) -> StepTensors:
    """Makes those of a step whose sizes are on the host, with one copy to the device."""
    numbers = step_numbers(
        np.array(batch.query_lens), np.array(batch.context_lens), batch.bidirectional_spans
    )
    on_device = upload_as_they_are(numbers, batch.slots.device)
    return StepTensors(*on_device, batch.block_tables.int(), batch.block_size, batch.is_decode)


def tiles_for(num_heads: int, cache: LayerCache, dtype: torch.dtype) -> Tiles:
    """dtype: of the queries. An H100 measured the sizes for heads of 64 and 128 channels in bfloat16; what
    the compiler needs for them (registers, shared memory) chose the others."""
    _, key_scales = tensors_of(cache.key)
    (kv_heads, key_width), (_, value_width) = cache.key.row_shape, cache.value.row_shape
    is_quantised, is_exact = key_scales is not None, dtype == torch.float32
    return _tiles(num_heads // kv_heads, key_width, value_width, is_quantised, is_exact)


@cached
def _tiles(group: int, key_width: int, value_width: int, is_quantised: bool, is_exact: bool) -> Tiles:
    is_wide, is_narrow = max(key_width, value_width) > 128, max(key_width, value_width) <= 64
    prompt_tile = _SMALLEST_TILE if is_exact else 64 if is_wide else 128
    return Tiles(
        group,
        row_tile=max(_SMALLEST_TILE, power_of_two(group)),
        prompt_tile=max(prompt_tile, power_of_two(group)),
        row_keys=32 if is_exact or is_wide else 64,
        prompt_keys=32 if is_exact or is_wide else 128 if is_narrow and not is_quantised else 64,
        row_warps=2 if is_quantised and not is_exact else 4,
        prompt_warps=4 if is_exact else 8,
        row_stages=_NARROW_STAGES if is_narrow and not is_quantised and not is_exact else _STAGES,
        row_programs=2 if is_exact or is_wide else 6 if is_quantised else 4,
        prompt_programs=2 if is_exact or is_narrow else 1,
        key_run=_run(key_width, is_quantised),
        value_run=_run(value_width, is_quantised),
    )


def plan(step: StepTensors, tiles: Tiles, window: int | None, num_places: int | None = None) -> AttentionPlan:
    """One launch. `window` as in `LayerAttention`. num_places: at least so many as the step's partial
    results; None: as many as a step of these sizes can have."""
    from cluster.model.cuda import attention_kernels

    num_tokens, num_seqs = len(step.seqs), len(step.contexts)
    capacity = item_capacity(num_tokens, num_seqs, tiles, step.is_decode)
    sizes = [2 * capacity * _ITEM_WIDTH, 2 * 4, _aligned(num_seqs), _aligned(num_seqs)]
    items, counts, seq_shares, seq_places = step.seqs.new_empty(sum(sizes)).split(sizes)
    made = AttentionPlan(
        window or _NO_WINDOW, items.view(2, capacity, _ITEM_WIDTH), counts.view(2, 4), seq_shares, seq_places,
        place_capacity(num_tokens, num_seqs) if num_places is None else num_places,
    )  # fmt: skip
    attention_kernels.plan[(-(-capacity // _ITEMS_PER_PROGRAM), 1 if step.is_decode else 2)](
        step.starts, step.contexts, step.indices, step.ends, step.rows, items, counts, seq_shares, seq_places,
        num_seqs, made.window, capacity,
        ROW_TOKENS=tiles.row_tokens, TILE_TOKENS=tiles.prompt_tokens, ITEMS=_ITEMS_PER_PROGRAM,
        SEQS=_SEQS_PER_PASS, num_warps=_PLAN_WARPS, **early(step.seqs.device),
    )  # fmt: skip
    return made


def attend(
    query: Tensor, cache: LayerCache, layer: LayerAttention, step: StepTensors, plan: AttentionPlan,
    tiles: Tiles, num_processors: int, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """query [T, Hq, D], contiguous, of any float dtype; the new K and V are in the cache. layer: its window
    is that of `plan`; sinks [Hq] in any float dtype. num_processors: the device's multiprocessors. Returns
    [T, Hq, Dv] in query's dtype; padding tokens become zero."""
    from cluster.model.cuda import attention_kernels

    num_tokens, num_heads, key_width = query.shape
    key, key_scales = tensors_of(cache.key)
    value, value_scales = tensors_of(cache.value)
    kv_heads, value_width = cache.value.row_shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_width)
    partial_out = query.new_empty((plan.num_places, num_heads, value_width), dtype=torch.float32)
    partial_stats = query.new_empty((plan.num_places, num_heads, 2), dtype=torch.float32)
    factor = _HALF_FACTOR if value_scales is not None and query.dtype == torch.float16 else 1.0
    lists = [
        (
            tiles.row_tile, tiles.row_keys, tiles.row_warps, tiles.row_programs, tiles.row_stages,
            tiles.row_registers,
        ),
        (
            tiles.prompt_tile, tiles.prompt_keys, tiles.prompt_warps, tiles.prompt_programs, _STAGES,
            _REGISTERS,
        ),
    ]  # fmt: skip
    if step.is_decode:
        del lists[1]
    for number, (rows, keys, warps, per_processor, stages, registers) in enumerate(lists):
        wanted = -(-num_processors * per_processor // kv_heads)
        attention_kernels.attend[(min(wanted, plan.items.shape[1]), kv_heads)](
            query, _pairs(key), _words(key_scales), _pairs(value), _words(value_scales), step.tables,
            step.indices, step.ends,
            plan.items[number], plan.counts[number], layer.sinks, out, partial_out, partial_stats,
            layer.scaling, layer.softcap or 1.0, plan.window, step.tables.stride(0),
            BLOCK_SIZE=step.block_size, KV_HEADS=kv_heads, GROUP=tiles.group, ROWS=rows,
            K_WIDTH=key_width, K_RUN=tiles.key_run[0], K_RUNS=tiles.key_run[1],
            V_WIDTH=value_width, V_RUN=tiles.value_run[0], V_RUNS=tiles.value_run[1],
            TILE=keys, HAS_SOFTCAP=layer.softcap is not None, FACTOR=factor,
            HAS_PTX=query.dtype == torch.bfloat16 and query.device.type != "cpu", num_warps=warps,
            num_stages=stages, maxnreg=registers, **early(query.device),
        )  # fmt: skip
    merged = 1 if step.is_decode else _MERGED_HEADS
    attention_kernels.merge[(num_tokens, -(-num_heads // merged))](
        partial_out, partial_stats, step.seqs, step.starts, plan.seq_shares, plan.seq_places, layer.sinks,
        out,
        HEADS=num_heads, MERGED=merged, V_WIDTH=value_width, V_PAD=power_of_two(value_width),
        SHARES_PAD=MAX_SHARES, num_warps=4, **early(query.device),
    )  # fmt: skip
    return out


def place_capacity(num_tokens: int, num_seqs: int) -> int:
    """The most partial results of a step, each of a token and a share of its keys, if it is recorded."""
    return min(MAX_SHARES * num_tokens, MAX_PLACES * num_seqs, RECORDED_PLACES)


def num_places(counts: Sequence[int], contexts: Sequence[int]) -> int:
    """At least so many as the partial results of sequences with so many new tokens, and keys."""
    new, seen = np.array(counts), np.array(contexts)
    shares = np.minimum(-(-seen // KEYS_PER_SHARE), MAX_SHARES)
    shares = np.minimum(shares, MAX_PLACES // np.maximum(new, 1))
    return int((new * shares)[shares > 1].sum())


def partial_bytes(num_heads: int, value_width: int, num_tokens: int) -> int:
    """The most that partial results of one layer take in a step with so many tokens. Those of a step with
    over 512 tokens take more only if over 32 of its sequences have long contexts and some new tokens each."""
    return MAX_SHARES * min(num_tokens, 512) * num_heads * (value_width + 2) * 4


def item_capacity(num_tokens: int, num_seqs: int, tiles: Tiles, is_decode: bool) -> int:
    """The most items of one list. A sequence of one share has a tile for each `prompt_tokens` of its own, the
    last not full; one of several shares has MAX_PLACES tokens times shares, and a tile for each share that is
    not full."""
    if is_decode:
        return MAX_SHARES * num_seqs
    of_tiles = num_seqs * (MAX_PLACES // tiles.prompt_tokens + MAX_SHARES) + num_tokens // tiles.prompt_tokens
    return min(MAX_SHARES * num_tokens, of_tiles)


def _pairs(contents: Tensor) -> Tensor:
    """Two codes in an int16; other contents as they are."""
    return contents.view(torch.int16) if contents.dtype == torch.int8 else contents


def _words(scales: Tensor | None) -> Tensor | None:
    """Two scales in an int32, where they lie so."""
    if scales is None or scales.numel() % 2 or scales.data_ptr() % 4:
        return scales
    return scales.view(-1).view(torch.int32)


def _aligned(count: int) -> int:
    """So many numbers of four bytes that the next tensor begins at a multiple of 16 bytes."""
    return -(-count // 4) * 4


def _run(width: int, is_quantised: bool) -> tuple[int, int]:
    """Channels of a run (a power of two that matrix units take) and the number of runs of a head."""
    smallest = 2 * _SMALLEST_TILE if is_quantised else _SMALLEST_TILE  # of which each part is a half
    padded = max(smallest, power_of_two(width))
    run = min(padded, GROUP_WIDTH) if is_quantised or padded > width else padded
    return run, -(-width // run)
