"""Attention for recorded steps of any kind, in plain torch: it knows a step by its `StepTensors` alone, as
our kernels do, and reads nothing on the host. Every token looks at all rows of its table."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.cuda.paged_attention import step_of
from cluster.model.kv_format import LayerCache


class RecordedAttention:
    """Implements `ModelAttention`."""

    def can_capture(self, cache: LayerCache) -> bool:
        return True

    def score_bytes(self, num_heads: int, width: int, num_tokens: int, max_context: int) -> int:
        return 0

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        cache.write(batch.slots, key, value)

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        step, device = step_of(batch, layer.sliding_window), query.device
        positions = torch.arange(step.tables.shape[1] * step.block_size, device=device)
        tables = step.tables[step.rows[step.seqs.clamp(min=0).long()].long()].long()
        slots = tables[:, positions // step.block_size] * step.block_size + positions % step.block_size
        group = query.shape[1] // cache.key.row_shape[0]
        key, value = (
            store.rows(slots.flatten(), torch.float32).view(*slots.shape, *store.row_shape)
            for store in (cache.key, cache.value)
        )
        query = query.unflatten(1, (-1, group)).float()
        scores = torch.einsum("tkgd,tskd->tkgs", query, key).flatten(1, 2) * layer.scaling
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        hidden = positions >= step.ends[:, None]
        if layer.sliding_window is not None:
            hidden = hidden | (positions <= step.indices[:, None] - layer.sliding_window)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(1, -1, 1).expand(len(scores), -1, 1)
            scores = torch.cat([scores, sinks], -1)
        probs = scores.softmax(-1)[..., : len(positions)].unflatten(1, (-1, group))
        out = torch.einsum("tkgs,tskd->tkgd", probs, value).flatten(1, 2)
        return out.masked_fill((step.seqs < 0)[:, None, None], 0.0).to(new_value.dtype)
