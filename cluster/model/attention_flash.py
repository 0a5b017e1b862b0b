"""Attention over block memory with flash-attn 2. Untried on hardware: written against flash_attn 2.8's signatures only.

Paged kernels want a block size that is a multiple of 256; they serve decode and chunks when it is. Everything else
(smaller blocks, two-way spans, sinks, K and V of different widths) goes to the fallback. Importing this module needs
flash_attn; `make_backend` falls back where it is missing.
"""

from __future__ import annotations

import torch
from flash_attn import (  # pyright: ignore[reportMissingImports]
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch import Tensor

from cluster.model.attention import AttentionBackend, LayerAttention, PagedBatch

_PAGE_MULTIPLE = 256  # flash-attn 2: "Paged KV cache block size must be divisible by 256"


class FlashAttention:
    def __init__(self, fallback: AttentionBackend):
        self._fallback = fallback

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        key_blocks: Tensor, value_blocks: Tensor,
    ) -> Tensor:  # fmt: skip
        if not _can_run(batch, layer, key_blocks, value_blocks):
            return self._fallback.attend(batch, layer, query, new_key, new_value, key_blocks, value_blocks)
        window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
        tables = batch.block_tables.int()
        shared = {
            "softmax_scale": layer.scaling, "causal": True, "window_size": window, "softcap": layer.softcap or 0.0,
            "block_table": tables,
        }  # fmt: skip
        if batch.is_decode:
            lens = batch.context_lens_tensor.int()
            out = flash_attn_with_kvcache(
                query[:, None], key_blocks, value_blocks, cache_seqlens=lens, **shared
            )
            return out[:, 0]
        starts_q = _starts(torch.tensor(batch.query_lens, device=query.device))
        starts_k = _starts(batch.context_lens_tensor)
        return flash_attn_varlen_func(
            query.contiguous(), key_blocks, value_blocks, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
            max_seqlen_q=max(batch.query_lens), max_seqlen_k=max(batch.context_lens), **shared,
        )  # fmt: skip


def _can_run(batch: PagedBatch, layer: LayerAttention, key_blocks: Tensor, value_blocks: Tensor) -> bool:
    return (
        batch.block_size % _PAGE_MULTIPLE == 0
        and layer.sinks is None
        and key_blocks.shape == value_blocks.shape
        and not any(batch.bidirectional_spans)
    )


def _starts(lengths: Tensor) -> Tensor:
    """[B] → [B + 1] int32: exclusive prefix sums."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
