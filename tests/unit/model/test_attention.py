"""The torch backend against a plain softmax over all positions, for every feature and cache format, in decode
and in prefill; and the attention function itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.model import attention_torch
from cluster.model.attention import LayerAttention, PagedBatch, paged_attention
from cluster.model.attention_torch import TorchAttention
from cluster.model.kv_format import KvCacheDtype, LayerCache
from tests.gpu.cases import Heads, paged_case
from tests.unit.model.attention_cases import Shape, Spans, Step, dense, make_step, run

HEADS = 4

layers = st.builds(
    lambda window, softcap, sinks: LayerAttention(
        0.3, window, softcap, torch.linspace(-1, 1, HEADS) if sinks else None
    ),
    st.sampled_from([None, 1, 3, 4, 5, 16, 1000]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)


@settings(max_examples=60)
@given(
    layer=layers,
    sizes=st.lists(st.tuples(st.integers(0, 23), st.integers(1, 9)), min_size=1, max_size=4),
    decode=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    spans=st.sampled_from(Spans),
    kv_cache_dtype=st.sampled_from(["auto", "int8"]),
)
def test_paged_attention_equals_dense_attention(
    layer: LayerAttention,
    sizes: list[tuple[int, int]],
    decode: bool,
    block_size: int,
    spans: Spans,
    kv_cache_dtype: KvCacheDtype,
) -> None:
    if decode:
        sizes = [(context, 1) for context, _ in sizes]
    shape = Shape(HEADS, block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    step = make_step(shape, sizes, spans)
    out = run(TorchAttention(), step, layer)
    torch.testing.assert_close(out, dense(shape, step, layer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [[(0, 300), (0, 70)], [(500, 200), (0, 33)], [(1, 1), (777, 1)]])
@pytest.mark.parametrize("heads", [Heads(28, 4, 128, 128), Heads(8, 1, 256, 256)])
def test_scores_with_a_soft_cap_are_not_rounded_to_bfloat16(
    sizes: list[tuple[int, int]], heads: Heads
) -> None:
    layer = LayerAttention(0.1, softcap=20.0)
    case = paged_case(sizes, layer, heads, block_size=16, dtype=torch.bfloat16)
    out = TorchAttention().attend(case.batch, layer, case.query, case.new_key, case.new_value, case.cache)
    torch.testing.assert_close(out.float(), case.expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_prompt_in_chunks_gets_what_the_whole_prompt_gets(kv_cache_dtype: KvCacheDtype) -> None:
    shape = Shape(HEADS, key_width=24, value_width=24, kv_cache_dtype=kv_cache_dtype)
    whole = make_step(shape, [(0, 40)], seed=3)
    expected = run(TorchAttention(), whole, LayerAttention(0.3))
    chunked = make_step(shape, [(0, 40)], seed=3)
    outs = [
        run(TorchAttention(), _piece(chunked, start, min(start + 7, 40)), LayerAttention(0.3))
        for start in range(0, 40, 7)
    ]
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-5, atol=1e-6)
    for here, there in zip(whole.batch.kv.segments, chunked.batch.kv.segments, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("layer", [
    LayerAttention(0.3, 16), LayerAttention(0.3, softcap=2.0),
    LayerAttention(0.3, sinks=torch.linspace(-1, 1, HEADS)),
])  # fmt: skip
@pytest.mark.parametrize("spans", Spans)
def test_a_chunk_whose_scores_take_too_much_memory_runs_in_slices(layer, spans: Spans, monkeypatch) -> None:
    shape, sizes = Shape(HEADS), [(40, 33), (0, 20), (7, 1)]
    largest = []
    kernels = ("_explicit", "_fused")
    for name in kernels:
        monkeypatch.setattr(attention_torch, name, _noting(getattr(attention_torch, name), largest))
    step = make_step(shape, sizes, spans)
    monkeypatch.setattr(attention_torch, "SCORE_BYTES", HEADS * 13 * 73 * 5)
    out = run(TorchAttention(), step, layer)
    torch.testing.assert_close(out, dense(shape, step, layer), rtol=1e-4, atol=1e-5)
    is_explicit = layer.softcap is not None or layer.sinks is not None
    # full slices of the first chunk: 73 keys, or 48 in the window, where one mask serves all heads
    assert largest.count((5, 73) if is_explicit else (30, 48)) == (6 if is_explicit else 1)


def _noting(kernel, sizes: list[tuple[int, int]]):
    """Notes the shape of every mask of a chunk."""

    def call(layer, query, key, value, mask, *rest, **named):
        if mask is not None and mask.dim() == 2:
            sizes.append(tuple(mask.shape))
        return kernel(layer, query, key, value, mask, *rest, **named)

    return call


def test_the_memory_plan_counts_scores_up_to_a_limit() -> None:
    assert TorchAttention().score_bytes(4, 16, 10, 100) == 4 * 10 * 100 * 13
    assert TorchAttention().score_bytes(64, 16, 2048, 131_072) == attention_torch.SCORE_BYTES


def _piece(step: Step, start: int, end: int) -> Step:
    """The chunk [start, end) of a step that is one whole prompt."""
    whole = step.batch
    batch = PagedBatch(
        whole.kv, whole.block_size, whole.slots[start:end], [end - start], [end], whole.block_tables,
        torch.tensor([end]), [[]],
    )  # fmt: skip
    own = slice(start, end)
    return Step(batch, step.cache, step.query[own], step.key[own], step.value[own], step.contexts)


def test_scratch_of_one_step_does_not_leak_into_the_next() -> None:
    backend, layer = TorchAttention(), LayerAttention(0.3)
    shape = Shape(HEADS)
    large, small = make_step(shape, [(30, 1), (9, 1)]), make_step(shape, [(3, 1)], seed=1)
    run(backend, large, layer)
    torch.testing.assert_close(run(backend, small, layer), dense(shape, small, layer), rtol=1e-4, atol=1e-5)


def test_on_layer_is_called_between_the_write_and_the_attention() -> None:
    calls: list[object] = []

    class Backend:
        def write(self, batch: PagedBatch, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
            calls.append("write")

        def attend(self, batch, layer, query, new_key, new_value, cache) -> torch.Tensor:
            calls.append("attend")
            return query

    module: Any = torch.nn.Identity()
    module.layer_idx = 0
    step = make_step(Shape(HEADS, key_width=8, value_width=8), [(4, 1)])
    step.batch.on_layer = calls.append
    query, key, value = (x.transpose(0, 1)[None] for x in (step.query, step.key, step.value))
    paged_attention(module, query, key, value, None, paged=(step.batch, Backend()))
    assert calls == ["write", 0, "attend"]


def test_a_backbone_that_is_run_from_elsewhere_says_so() -> None:
    with pytest.raises(RuntimeError, match="only inside LanguageModel"):
        nothing = torch.zeros(1, 1, 1, 1)
        paged_attention(torch.nn.Identity(), nothing, nothing, nothing, None)
