"""What libraries are given by the CUDA backend: stand-ins with their signatures answer from a plain softmax.
Our own kernels: test_cuda_paged_attention.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cluster.model import attention_cuda
from cluster.model.attention import LayerAttention
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.libraries import Flash2, Flash3, Flash4, FlashLibrary, TorchVarlen
from tests.gpu.cases import Heads, PagedCase, paged_case
from tests.unit.model.attention_cases import dense_sequence

PLAIN = LayerAttention(0.3)


def flash_module(calls: list[str]) -> SimpleNamespace:
    """Both functions of flash-attn 2 and 3 in plain torch, by the names and keywords that we use."""

    def answer(query, key, value, starts_q, starts_k, *, softmax_scale, causal, window_size) -> Tensor:
        assert causal
        assert window_size[0] == -1 or window_size[1] == 0
        layer = LayerAttention(softmax_scale, window_size[0] + 1 if window_size[0] >= 0 else None)
        parts = []
        for seq in range(len(starts_q) - 1):
            keys = slice(starts_k[seq], starts_k[seq + 1])
            parts.append(
                dense_sequence(layer, query[starts_q[seq] : starts_q[seq + 1]], key[keys], value[keys])
            )
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
        q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, **keywords
    ) -> Tensor:
        calls.append("kvcache")
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        return paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, **keywords)

    def torch_varlen(q, k, v, starts_q, starts_k, max_q, max_k, *, scale, window_size, enable_gqa) -> Tensor:
        assert enable_gqa and window_size[1] == 0
        calls.append("varlen")
        return answer(q, k, v, starts_q, starts_k, softmax_scale=scale, causal=True, window_size=window_size)

    return SimpleNamespace(
        flash_attn_varlen_func=varlen, flash_attn_with_kvcache=with_kvcache, varlen_attn=torch_varlen
    )


def cute_module(calls: list[str]) -> SimpleNamespace:
    """flash-attn 4's one function, which returns a pair."""
    older = flash_module(calls)

    def varlen(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q, max_seqlen_k, seqused_k=None,
        page_table=None, window_size, **keywords,
    ) -> tuple[Tensor, None]:  # fmt: skip
        keywords["window_size"] = tuple(-1 if side is None else side for side in window_size)
        if page_table is None:
            arguments = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return older.flash_attn_varlen_func(q, k, v, *arguments, **keywords), None
        assert cu_seqlens_k is None and seqused_k is not None and max_seqlen_k >= seqused_k.max()
        return older.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, **keywords,
        ), None  # fmt: skip

    return SimpleNamespace(flash_attn_varlen_func=varlen)


def library(generation, calls: list[str]) -> FlashLibrary:
    return generation((cute_module if generation is Flash4 else flash_module)(calls))


@pytest.fixture(autouse=True)
def small_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which steps libraries get: tests/unit/cuda/test_layer_launches.py."""
    monkeypatch.setattr(attention_cuda, "LONG_STEP", 4)
    monkeypatch.setattr(attention_cuda, "MAX_ANSWER", 1)


def attend(library: FlashLibrary, layer: LayerAttention, case: PagedCase) -> Tensor:
    subject = CudaAttention(TorchAttention(), 4, library)
    return subject.attend(case.batch, layer, case.query, case.new_key, case.new_value, case.cache)


@pytest.mark.parametrize("sizes", [[(0, 5), (0, 3)], [(7, 4), (0, 2), (290, 5)]])
@pytest.mark.parametrize("layer", [PLAIN, LayerAttention(0.3, sliding_window=4)])
@pytest.mark.parametrize("generation", [Flash2, Flash3, Flash4, TorchVarlen])
@pytest.mark.parametrize("block_size", [16, 256])
def test_long_chunks_equal_dense_attention_through_libraries(sizes, layer, generation, block_size) -> None:
    case = paged_case(sizes, layer, Heads(), block_size=block_size)
    calls: list[str] = []
    out = attend(library(generation, calls), layer, case)
    torch.testing.assert_close(out, case.expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("generation", "block_size", "expected"),
    [
        (Flash2, 256, "varlen paged"), (Flash2, 16, "varlen"), (Flash3, 16, "kvcache"),
        (Flash4, 16, "kvcache"), (TorchVarlen, 256, "varlen"),
    ],
)  # fmt: skip
def test_pages_are_read_where_the_library_can(generation, block_size, expected) -> None:
    calls: list[str] = []
    attend(
        library(generation, calls), PLAIN, paged_case([(3, 2), (5, 3)], PLAIN, Heads(), block_size=block_size)
    )
    assert calls == [expected]
