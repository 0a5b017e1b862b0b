"""The attention backend on CUDA, as layers call it, in Triton's interpreter: it equals dense attention for
every mix, and its plan covers every token and key once. The interpreter has to be asked for:
TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.model.attention import LayerAttention, PagedBatch, StepTensors
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.paged_attention import (
    Tiles,
    item_capacity,
    place_capacity,
    plan,
    plan_of,
    step_tensors,
)
from cluster.model.kv_format import layer_cache
from tests.fakes.far_memory import far_ids, far_memory
from tests.unit.model.attention_cases import Shape, Spans, Step, dense, make_step, run

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
SMALL = Shape(heads=4, kv_heads=2, key_width=16, value_width=16)
CAUSAL = LayerAttention(0.3)


def attended(step: Step, layer: LayerAttention, tensors: StepTensors | None = None) -> Tensor:
    """tensors: those of a recorded step."""
    step = replace(step, batch=replace(step.batch, device=tensors, memo={}))
    return run(CudaAttention(TorchAttention(), num_processors=1), step, layer)


MIXES = {
    "answers": [(3, 1), (0, 1), (290, 1)],
    "prompts": [(0, 40), (0, 3)],
    "mixed": [(7, 5), (290, 1), (0, 20), (130, 2)],
    "drafts of several shares": [(520, 3), (2, 4)],
    "a chunk of several shares": [(700, 40), (0, 9)],
}


def spans_of(mix: str) -> Spans:
    return {"mixed": Spans.EVERYWHERE, "prompts": Spans.WITH_WINDOW}.get(mix, Spans.NONE)


SINKS = torch.linspace(-1, 1, 4)
LAYERS = {
    "causal": (CAUSAL, "auto"),
    "causal, INT8": (CAUSAL, "int8"),
    "window and sinks": (LayerAttention(0.3, sliding_window=9, sinks=SINKS), "int8"),
    "wide window and cap": (LayerAttention(0.3, sliding_window=270, softcap=2.0), "auto"),
    "cap and sinks": (LayerAttention(0.3, softcap=2.0, sinks=SINKS), "int8"),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_mix_equals_dense_attention(mix: str, name: str) -> None:
    layer, kv_cache_dtype = LAYERS[name]
    shape = replace(SMALL, kv_cache_dtype=kv_cache_dtype)
    step = make_step(shape, MIXES[mix], spans_of(mix))
    expected = dense(shape, step, layer)
    torch.testing.assert_close(attended(step, layer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_mix_equals_plain_torch_in_half_precision(mix: str, name: str) -> None:
    layer, kv_cache_dtype = LAYERS[name]
    shape = replace(SMALL, dtype=torch.float16, kv_cache_dtype=kv_cache_dtype)
    step, other = (make_step(shape, MIXES[mix], spans_of(mix)) for _ in range(2))
    expected, out = run(TorchAttention(), other, layer), attended(step, layer)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)
    for here, there in zip(step.batch.kv.segments, other.batch.kv.segments, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 64, 64, block_size=1, kv_cache_dtype="int8"),
        Shape(7, 1, 80, 80, block_size=16),
        Shape(7, 1, 80, 80, block_size=16, kv_cache_dtype="int8"),
        Shape(6, 2, 96, 24, block_size=16, kv_cache_dtype="int8"),
        Shape(14, 2, 128, 128, block_size=32),
        Shape(8, 2, 256, 256, block_size=8),
        Shape(8, 2, 256, 256, block_size=8, kv_cache_dtype="int8"),
        Shape(3, 3, 192, 128, block_size=5),
        Shape(40, 1, 16, 16),
    ],
    ids=lambda shape: f"{shape.heads}/{shape.kv_heads}/{shape.key_width}/{shape.value_width}",
)
def test_every_shape_of_heads_equals_dense_attention(shape: Shape) -> None:
    step = make_step(shape, [(258, 1), (30, 12)], Spans.EVERYWHERE)
    expected = dense(shape, step, CAUSAL)
    torch.testing.assert_close(attended(step, CAUSAL), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_half_precision_errs_by_the_rounding_of_probabilities(kv_cache_dtype) -> None:
    """Values that are small, so that probability times scale would be lost in float16."""
    shape = replace(SMALL, dtype=torch.float16, kv_cache_dtype=kv_cache_dtype)
    step = make_step(shape, [(258, 1), (5, 9)])
    step.value.mul_(1e-3)
    for _, value in step.contexts:
        value.mul_(1e-3)
    for i, (key, value) in enumerate(step.contexts):
        positions = torch.arange(len(key))
        slots = step.batch.block_tables[i][positions // 4] * 4 + positions % 4
        step.cache.write(slots, key, value)
    expected, out = dense(shape, step, CAUSAL), attended(step, CAUSAL).float()
    assert float((out - expected).norm() / expected.norm()) < (2e-3 if kv_cache_dtype == "auto" else 2e-2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_blocks_may_lie_anywhere_in_a_large_memory(kv_cache_dtype) -> None:
    near = make_step(replace(SMALL, dtype=torch.float16, kv_cache_dtype=kv_cache_dtype), [(7, 5), (290, 1)])
    batch, kv = near.batch, far_memory(near.batch.kv.layout)
    ids = far_ids(kv, batch.kv.num_blocks)
    for target, source in zip(kv.segments, batch.kv.segments, strict=True):
        target[ids.start :] = source
    tables, slots = batch.block_tables + ids.start, batch.slots + ids.start * batch.block_size
    moved = replace(batch, kv=kv, block_tables=tables, slots=slots)
    far = replace(near, batch=moved, cache=layer_cache(kv, 0))
    assert torch.equal(attended(far, CAUSAL), attended(near, CAUSAL))
    assert all(torch.equal(a[ids.start :], b) for a, b in zip(kv.segments, batch.kv.segments, strict=True))


@pytest.mark.parametrize("window", [None, 20])
def test_unwritten_rows_are_not_read(window: int | None) -> None:
    layer = LayerAttention(0.3, sliding_window=window)
    step = make_step(SMALL, MIXES["mixed"])
    expected = dense(SMALL, step, layer)
    for i, (new, context) in enumerate(zip(step.batch.query_lens, step.batch.context_lens, strict=True)):
        first = 0 if window is None else max(0, context - new - window + 1)
        unseen = torch.cat([torch.arange(first), torch.arange(context, step.batch.block_tables.shape[1] * 4)])
        blocks = step.batch.block_tables[i][unseen // 4]
        stores: tuple[Any, Any] = (step.cache.key, step.cache.value)
        for store in stores:
            store.data.flatten(0, 1)[(blocks * 4 + unseen % 4)[blocks > 0]] = float("nan")
    step.batch.kv.segments[0][0] = step.batch.kv.segments[1][0] = float("nan")
    torch.testing.assert_close(attended(step, layer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [CAUSAL, LayerAttention(0.3, sliding_window=300, softcap=2.0)])
def test_a_row_has_the_same_bits_alone_and_in_company(layer: LayerAttention) -> None:
    sizes = [(520, 3), (7, 5), (290, 1), (0, 20)]
    together = make_step(SMALL, sizes)
    out = attended(together, layer)
    first = 0
    for i, (new, context) in enumerate(
        zip(together.batch.query_lens, together.batch.context_lens, strict=True)
    ):
        batch, own = together.batch, slice(first, first + new)
        alone = replace(
            batch, slots=batch.slots[own], query_lens=[new], context_lens=[context],
            block_tables=batch.block_tables[i : i + 1], bidirectional_spans=[()],
        )  # fmt: skip
        step = replace(
            together,
            batch=alone,
            query=together.query[own],
            key=together.key[own],
            value=together.value[own],
        )
        assert torch.equal(attended(step, layer), out[own])
        assert torch.equal(attended(step, layer, step_tensors(alone)), out[own])
        first += new


def padded(tensors: StepTensors, num_tokens: int, num_seqs: int) -> StepTensors:
    """The step in the buffers of a larger one, with the tables in other rows."""
    more_tokens, more_seqs = num_tokens - len(tensors.seqs), num_seqs - len(tensors.contexts)

    def filled(numbers: Tensor, count: int, value: int) -> Tensor:
        return torch.cat([numbers, numbers.new_full((count,), value)])

    return replace(
        tensors,
        seqs=filled(tensors.seqs, more_tokens, -1),
        indices=filled(tensors.indices, more_tokens, 0),
        ends=filled(tensors.ends, more_tokens, 0),
        starts=filled(tensors.starts, more_seqs, int(tensors.starts[-1])),
        contexts=filled(tensors.contexts, more_seqs, 0),
        rows=num_seqs - 1 - filled(tensors.rows, more_seqs, 0),
        tables=torch.nn.functional.pad(tensors.tables, (0, 3, 0, more_seqs)).flip(0),
    )


def test_padding_changes_no_bit_and_gives_zeros() -> None:
    step = make_step(SMALL, [(7, 5), (290, 1), (0, 20)])
    out = attended(step, CAUSAL)
    tensors = padded(step_tensors(step.batch), len(out) + 5, 7)
    query = torch.cat([step.query, torch.full_like(step.query[:5], float("nan"))])
    filled = attended(replace(step, query=query), CAUSAL, tensors)
    assert torch.equal(filled[:-5], out)
    assert torch.equal(filled[-5:], torch.zeros_like(filled[-5:]))


sizes_of_steps = st.lists(
    st.tuples(st.sampled_from([0, 1, 60, 256, 700, 3000]), st.sampled_from([0, 1, 2, 7, 40, 130])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15)
@given(
    sizes=sizes_of_steps,
    window=st.sampled_from([None, 1, 100, 129, 1000]),
    group=st.sampled_from([1, 7, 40]),
    with_spans=st.booleans(),
)
@example(sizes=[(9000, 1)] * 33 + [(500, 30)], window=None, group=7, with_spans=False)
@example(sizes=[(40000, 8)], window=None, group=40, with_spans=False)
def test_the_plan_covers_every_token_and_key_once(sizes, window, group, with_spans) -> None:
    counts = np.array([new for _, new in sizes])
    contexts = counts + [old for old, _ in sizes]
    starts = np.concatenate([[0], counts.cumsum()])
    seqs = np.repeat(np.arange(len(sizes)), counts)
    indices = np.arange(starts[-1]) - starts[seqs] + (contexts - counts)[seqs]
    ends = contexts[seqs] if with_spans else indices + 1
    tensors: Any = [
        torch.from_numpy(each.astype(np.int32))
        for each in (seqs, indices, ends, starts, contexts, np.arange(len(sizes)))
    ]
    tiles = Tiles(group, max(16, group), max(64, group), 64, 64, 8, 5, 3, 3, 1, (16, 1), (16, 1))
    tables, is_decode = torch.zeros(len(sizes), 1), bool((counts < 2).all())
    step = StepTensors(*tensors, tables=tables, block_size=4, is_decode=is_decode)
    made = plan(step, tiles, window)
    capacity = item_capacity(len(seqs), len(sizes), tiles, step.is_decode)
    num_places = place_capacity(len(seqs), len(sizes))
    covered = [np.zeros(end, dtype=int) for end in ends]
    places: list[int] = []
    for of_tiles in range(1 if step.is_decode else 2):
        num_items = int(made.counts[of_tiles, 0])
        assert num_items <= capacity
        for seq, token, num_tokens, first, end, place, shares in made.items[
            of_tiles, :num_items, :7
        ].tolist():
            assert (counts[seq] > tiles.row_tokens) == of_tiles
            assert 0 < num_tokens <= (tiles.prompt_tokens if of_tiles else tiles.row_tokens)
            assert (place < 0) == (shares == 1) and shares == made.seq_shares[seq]
            for row in range(token, token + num_tokens):
                assert seqs[row] == seq
                seen_from = max(0, indices[row] - (window or 1 << 30) + 1)
                covered[row][max(first, seen_from) : end] += 1
                if shares > 1:
                    places.append(place + (row - token) * shares)
                    first_place = int(made.seq_places[seq]) + (row - starts[seq]) * shares
                    assert 0 <= places[-1] - first_place < shares
    assert len(set(places)) == len(places) and max(places, default=-1) < num_places
    for row, numbers in enumerate(covered):
        seen_from = max(0, indices[row] - (window or 1 << 30) + 1)
        assert (numbers[seen_from:] == 1).all() and not numbers[:seen_from].any()


@settings(max_examples=8)
@given(sizes=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 300)), min_size=1, max_size=3))
def test_an_unrecorded_step_has_place_for_all_partial_results(sizes) -> None:
    counts, contexts = [new for _, new in sizes], [old + new for old, new in sizes]
    num_tokens, num_blocks = sum(counts), -(-max(contexts) // 4)
    batch = PagedBatch(
        None, 4, torch.zeros(num_tokens), counts, contexts,  # type: ignore[arg-type]  # no K and V are read
        torch.zeros(len(sizes), num_blocks), torch.tensor(contexts), [()] * len(sizes),
    )  # fmt: skip
    made = plan_of(batch, Tiles(7, 16, 64, 64, 64, 8, 5, 3, 3, 1, (16, 1), (16, 1)), None)
    shares = made.seq_shares[: len(sizes)]
    used = int((shares * torch.tensor(counts))[shares > 1].sum())
    assert used <= made.num_places <= place_capacity(num_tokens, len(sizes))
