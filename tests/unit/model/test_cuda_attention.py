"""The CUDA backend without a GPU: which call goes where, what flash-attn is given (stand-ins with its
signatures answer from a plain softmax), and our kernels in Triton's interpreter, which has to be asked for:
TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.model.attention import LayerAttention
from cluster.model.attention_flash import FlashAttention, Route, route
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda import decode_attention
from cluster.model.cuda.libraries import Flash2, Flash3, Flash4, FlashLibrary, TorchVarlen
from cluster.model.kv_format import QuantizedRows
from tests.gpu.cases import Heads, dense, paged_case

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
PLAIN = LayerAttention(0.3)


def flash_module(calls: list[str]) -> SimpleNamespace:
    """Both functions of flash-attn 2 and 3 in plain torch, by the names and keywords that we use."""

    def answer(
        query, key, value, starts_q, starts_k, *, softmax_scale, causal, window_size, softcap
    ) -> Tensor:
        assert causal
        assert window_size[0] == -1 or window_size[1] == 0
        layer = LayerAttention(
            softmax_scale, window_size[0] + 1 if window_size[0] >= 0 else None, softcap or None
        )
        parts = []
        for seq in range(len(starts_q) - 1):
            keys = slice(starts_k[seq], starts_k[seq + 1])
            parts.append(dense(layer, query[starts_q[seq] : starts_q[seq + 1]], key[keys], value[keys]))
        return torch.cat(parts).to(query.dtype)

    def paged(query, key, value, starts_q, contexts, table, **keywords) -> Tensor:
        assert table.dtype == contexts.dtype == starts_q.dtype == torch.int32
        rows = [
            blocks[t.long()].flatten(0, 1)[:n]
            for blocks in (key, value)
            for t, n in zip(table, contexts, strict=True)
        ]
        starts_k = torch.cat([torch.zeros(1, dtype=torch.int64), contexts.cumsum(0)])
        half = len(contexts)
        return answer(query, torch.cat(rows[:half]), torch.cat(rows[half:]), starts_q, starts_k, **keywords)

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=None, **keywords
    ) -> Tensor:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
        calls.append("varlen" if block_table is None else "varlen paged")
        if block_table is None:
            return answer(q, k, v, cu_seqlens_q, cu_seqlens_k, **keywords)
        return paged(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, **keywords)

    def with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table=None,
        page_table=None,
        cu_seqlens_q: Any = None,
        max_seqlen_q=None,
        **keywords,
    ) -> Tensor:
        calls.append("kvcache")
        if page_table is not None:
            assert max_seqlen_q == cu_seqlens_q.diff().max()
            return paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, **keywords)
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return paged(q[:, 0], k_cache, v_cache, starts, cache_seqlens, block_table, **keywords)[:, None]

    def torch_varlen(q, k, v, starts_q, starts_k, max_q, max_k, *, scale, window_size, enable_gqa) -> Tensor:
        assert enable_gqa and window_size[1] == 0
        calls.append("varlen")
        return answer(
            q, k, v, starts_q, starts_k, softmax_scale=scale, causal=True, window_size=window_size, softcap=0
        )

    return SimpleNamespace(
        flash_attn_varlen_func=varlen, flash_attn_with_kvcache=with_kvcache, varlen_attn=torch_varlen
    )


def cute_module(calls: list[str]) -> SimpleNamespace:
    """flash-attn 4's one function, which returns a pair."""
    older = flash_module(calls)

    def varlen(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q, max_seqlen_k, seqused_k: Any = None,
        page_table=None, window_size, **keywords,
    ) -> tuple[Tensor, None]:  # fmt: skip
        keywords["window_size"] = tuple(-1 if side is None else side for side in window_size)
        if page_table is None:
            arguments = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return older.flash_attn_varlen_func(q, k, v, *arguments, **keywords), None
        assert cu_seqlens_k is None and max_seqlen_k >= seqused_k.max()
        return older.flash_attn_with_kvcache(
            q, k, v, seqused_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            **keywords,
        ), None  # fmt: skip

    return SimpleNamespace(flash_attn_varlen_func=varlen)


def library(generation, calls: list[str]) -> FlashLibrary:
    return generation((cute_module if generation is Flash4 else flash_module)(calls))


def backend(library: FlashLibrary | None, *, has_kernels: bool = False) -> FlashAttention:
    return FlashAttention(TorchAttention(), library, library, has_kernels, num_processors=4)


def attend(subject: FlashAttention, layer: LayerAttention, case) -> Tensor:
    return subject.attend(case.batch, layer, case.query, case.new_key, case.new_value, case.cache)


@pytest.mark.parametrize("sizes", [[(0, 5), (0, 3)], [(7, 4), (0, 2), (290, 1)], [(3, 1), (300, 1)]])
@pytest.mark.parametrize(
    "layer", [PLAIN, LayerAttention(0.3, sliding_window=4), LayerAttention(0.3, softcap=2.0)]
)
@pytest.mark.parametrize("generation", [Flash2, Flash3, Flash4, TorchVarlen])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_every_step_equals_dense_attention_through_flash(
    sizes,
    layer,
    generation,
    block_size,
    kv_cache_dtype,
):
    case = paged_case(sizes, layer, Heads(), block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    calls: list[str] = []
    out = attend(backend(library(generation, calls)), layer, case)
    torch.testing.assert_close(out, case.expected, rtol=1e-4, atol=1e-5)
    is_mixed = len({new == 1 for _, new in sizes}) == 2
    pages = generation.page_multiple
    reads_pages = pages is not None and pages <= block_size and kv_cache_dtype == "auto"
    can = generation.has_softcap or layer.softcap is None
    assert len(calls) == (2 if is_mixed and not reads_pages else 1) * can


@pytest.mark.parametrize(
    ("generation", "block_size", "sizes", "expected"),
    [
        (Flash2, 256, [(3, 1), (5, 1)], ["kvcache"]),
        (Flash2, 256, [(3, 2), (5, 1)], ["varlen paged"]),
        (Flash2, 16, [(3, 2), (5, 1)], ["varlen", "varlen"]),
        (Flash2, 16, [(0, 2), (0, 9)], ["varlen"]),
        (Flash3, 16, [(3, 2), (5, 1)], ["kvcache"]),
        (Flash3, 16, [(3, 1), (5, 1)], ["kvcache"]),
        (Flash4, 16, [(3, 2), (5, 1)], ["kvcache"]),
        (TorchVarlen, 256, [(3, 2), (5, 1)], ["varlen", "varlen"]),
    ],
)
def test_pages_are_read_where_the_library_can(generation, block_size, sizes, expected) -> None:
    calls: list[str] = []
    attend(
        backend(library(generation, calls)),
        PLAIN,
        paged_case(sizes, PLAIN, Heads(), block_size=block_size),
    )
    assert calls == expected


def test_whole_prompts_are_not_gathered() -> None:
    case = paged_case([(0, 5), (0, 3)], PLAIN, Heads(), block_size=16)
    case.batch.kv.buffer.zero_()  # what lies in the blocks must not matter
    out = attend(backend(Flash2(flash_module([]))), PLAIN, case)
    torch.testing.assert_close(out, case.expected, rtol=1e-4, atol=1e-5)


def test_the_rule_sends_everything_somewhere_that_can_do_it() -> None:
    decode = paged_case([(3, 1), (5, 1)], PLAIN, Heads())
    chunk = paged_case([(3, 2)], PLAIN, Heads())
    int8 = paged_case([(3, 1)], PLAIN, Heads(), kv_cache_dtype="int8")
    uneven = paged_case([(3, 1)], PLAIN, Heads(key_width=24), block_size=4)
    sinks = replace(PLAIN, sinks=torch.zeros(4))
    spans = replace(chunk.batch, bidirectional_spans=[[(3, 5)]])

    def library_of(page_multiple: int | None) -> FlashLibrary | None:
        return None if page_multiple is None else library(Flash2 if page_multiple == 256 else Flash3, [])

    def chosen(case, page_multiple: int | None, has_kernels: bool, layer: LayerAttention = PLAIN) -> Route:
        return route(case.batch, layer, case.cache, library_of(page_multiple), has_kernels)

    assert chosen(decode, 1, True) is Route.PAGES
    assert route(decode.batch, PLAIN, decode.cache, library_of(1), True, True) is Route.DECODE_KERNEL
    assert route(chunk.batch, PLAIN, chunk.cache, library_of(1), True, True) is Route.PAGES
    assert chosen(decode, 256, True) is Route.DECODE_KERNEL
    assert chosen(decode, 256, False) is Route.ROWS
    assert chosen(decode, None, True) is Route.DECODE_KERNEL
    assert chosen(decode, 1, True, sinks) is Route.DECODE_KERNEL
    assert chosen(decode, 1, False, sinks) is Route.FALLBACK
    assert chosen(int8, 1, True) is Route.DECODE_KERNEL
    assert chosen(int8, 1, False) is Route.ROWS
    assert chosen(uneven, 1, True) is Route.DECODE_KERNEL
    assert chosen(uneven, 1, False) is Route.FALLBACK
    assert chosen(chunk, 1, True) is Route.PAGES
    assert chosen(chunk, 256, True) is Route.ROWS
    assert chosen(chunk, None, True) is Route.FALLBACK
    assert chosen(chunk, 1, True, sinks) is Route.FALLBACK
    assert route(spans, PLAIN, chunk.cache, library_of(1), True) is Route.FALLBACK
    varlen, capped = library(TorchVarlen, []), replace(PLAIN, softcap=2.0)
    assert route(chunk.batch, PLAIN, chunk.cache, varlen, True) is Route.ROWS
    assert route(chunk.batch, capped, chunk.cache, varlen, True) is Route.FALLBACK
    assert route(decode.batch, PLAIN, decode.cache, varlen, True) is Route.DECODE_KERNEL


@pytest.mark.parametrize("sizes", [[(3, 1), (300, 1)], [(7, 4), (0, 2), (290, 1)], [(7, 4), (0, 2)]])
def test_our_kernels_decode_beside_a_library_that_reads_pages(sizes, monkeypatch) -> None:
    """Prompts by the library, answers by the kernels: in a mixed step, too."""
    calls: list[str] = []

    def decode(query, cache, tables, contexts, layer, num_splits) -> Tensor:
        calls.append("kernel")
        rows = []
        for own, table, count in zip(query, tables, contexts.tolist(), strict=True):
            key, value = (store.data[table].flatten(0, 1)[:count] for store in (cache.key, cache.value))
            rows.append(dense(layer, own[None], key, value))
        return torch.cat(rows)

    monkeypatch.setattr(decode_attention, "paged_decode", decode)
    case = paged_case(sizes, PLAIN, Heads(), block_size=16)
    subject = FlashAttention(TorchAttention(), library(Flash4, calls), None, True, num_processors=4)
    torch.testing.assert_close(attend(subject, PLAIN, case), case.expected, rtol=1e-4, atol=1e-5)
    kinds = {new == 1 for _, new in sizes}
    assert calls == ["kernel"] * (True in kinds) + ["kvcache"] * (False in kinds)
    assert subject.can_capture(16, case.cache)


def test_only_steps_that_ignore_the_contexts_may_be_captured() -> None:
    plain = paged_case([(3, 1)], PLAIN, Heads()).cache
    int8 = paged_case([(3, 1)], PLAIN, Heads(), kv_cache_dtype="int8").cache
    two, three = Flash2(flash_module([])), Flash3(flash_module([]))
    assert backend(three).can_capture(16, plain)
    assert backend(two).can_capture(256, plain)
    assert not backend(two).can_capture(16, plain)
    assert not backend(three).can_capture(16, int8)
    assert backend(None, has_kernels=True).can_capture(16, int8)


@given(rows=st.integers(1, 10_000), context=st.integers(1, 200_000), processors=st.integers(1, 200))
def test_splits_are_few_enough_to_fit_and_none_is_tiny(rows: int, context: int, processors: int) -> None:
    splits = decode_attention.num_splits_for(rows, context, processors)
    assert 1 <= splits <= decode_attention.MAX_SPLITS
    assert splits == 1 or context >= 256 * splits
    assert splits == 1 or rows * (splits - 1) < 2 * processors


@needs_triton
@settings(max_examples=25)
@given(
    contexts=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 5, 70]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    heads=st.sampled_from([Heads(), Heads(6, 2, 24, 40), Heads(3, 3, 80, 80), Heads(7, 1, 64, 128)]),
    block_size=st.sampled_from([1, 4, 16]),
    kv_cache_dtype=st.sampled_from(["auto", "int8"]),
    splits=st.sampled_from([1, 2, 5]),
)
def test_the_decode_kernel_equals_dense_attention(
    contexts,
    window,
    softcap,
    with_sinks,
    heads,
    block_size,
    kv_cache_dtype,
    splits,
):
    sinks = torch.linspace(-1, 1, heads.query) if with_sinks else None
    layer = LayerAttention(0.3, window, softcap, sinks)
    case = paged_case(
        [(context, 1) for context in contexts],
        layer,
        heads,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    batch = case.batch
    out = decode_attention.paged_decode(
        case.query, case.cache, batch.block_tables, batch.context_lens_tensor, layer, splits
    )
    torch.testing.assert_close(out, case.expected, rtol=1e-4, atol=1e-4)


@needs_triton
def test_the_backend_decodes_with_the_kernel_where_flash_cannot() -> None:
    case = paged_case([(30, 1), (2, 1)], PLAIN, Heads(), kv_cache_dtype="int8")
    out = attend(backend(None, has_kernels=True), PLAIN, case)
    torch.testing.assert_close(out, case.expected, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("width", [16, 64, 80, 192])
def test_the_write_kernel_makes_the_same_codes_and_scales_as_the_cache_itself(width: int) -> None:
    case = paged_case([(3, 6)], PLAIN, Heads(key_width=width), kv_cache_dtype="int8")
    store = case.cache.key
    assert isinstance(store, QuantizedRows)
    rows = torch.randn(2, 6, width).transpose(0, 1)  # heads first, as a model gives them
    rows[1] = 0
    rows[2] *= 1e-7
    rows[3] *= 1e4
    store.write(case.batch.slots, rows)
    codes, scales = store.codes.clone(), store.scales.clone()
    store.codes.fill_(7)
    store.scales.fill_(7)
    decode_attention.write_quantised(store, case.batch.slots, rows)
    slots = case.batch.slots
    assert torch.equal(store.codes.flatten(0, 1)[slots], codes.flatten(0, 1)[slots])
    assert torch.equal(store.scales.flatten(0, 1)[slots], scales.flatten(0, 1)[slots])
    untouched = torch.ones(store.codes.flatten(0, 1).shape[0], dtype=torch.bool).index_fill_(0, slots, False)
    assert (store.codes.flatten(0, 1)[untouched] == 7).all()


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32]
)  # the interpreter cuts bfloat16 off, GPUs round it
@pytest.mark.parametrize("width", [24, 64, 80])
def test_the_gather_kernel_gives_back_what_the_cache_itself_does(width: int, dtype: torch.dtype) -> None:
    case = paged_case([(30, 9)], PLAIN, Heads(key_width=width), kv_cache_dtype="int8")
    store = case.cache.key
    assert isinstance(store, QuantizedRows)
    slots = torch.randint(0, store.codes.shape[0] * 4, (37,))
    out = decode_attention.gather_quantised(store, slots, dtype)
    assert torch.equal(out, store.rows(slots, dtype))


@needs_triton
def test_chunks_over_int8_blocks_are_gathered_by_the_kernel_and_run_through_flash() -> None:
    case = paged_case([(30, 4), (0, 3)], PLAIN, Heads(), kv_cache_dtype="int8")
    out = attend(backend(Flash3(flash_module([])), has_kernels=True), PLAIN, case)
    torch.testing.assert_close(out, case.expected, rtol=1e-4, atol=1e-4)
