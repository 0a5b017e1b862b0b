"""Random packed steps over block memory and the dense attention that a backend must equal. Letters as in
`cluster.model.attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import AttentionBackend, LayerAttention, PagedBatch, Span
from cluster.model.kv_format import KvCacheDtype, LayerCache, dequantise, kv_segments, layer_cache, quantise

UNWRITTEN = 100  # fills rows that nothing may read


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_width: int = 8
    value_width: int = 6
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: KvCacheDtype = "auto"


@dataclass(frozen=True)
class Step:
    """One packed step whose contexts are written already; the new tokens are not."""

    batch: PagedBatch
    cache: LayerCache
    query: Tensor  # [T, Hq, D]
    key: Tensor  # [T, Hk, D]
    value: Tensor  # [T, Hk, Dv]
    contexts: list[tuple[Tensor, Tensor]]  # per sequence all K [S, Hk, D] and V, before they are quantised


class Spans(Enum):
    NONE = auto()
    EVERYWHERE = auto()  # a two-way span over each chunk's end
    WITH_WINDOW = auto()  # the same, in layers with a window alone


def make_step(shape: Shape, sizes: list[tuple[int, int]], spans: Spans = Spans.NONE, seed: int = 0) -> Step:
    """sizes: (tokens of the context, new tokens) per sequence."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, shape.kv_heads, width, generator=generator).to(shape.dtype)

    block_size = shape.block_size
    num_blocks = [-(-(context + new) // block_size) for context, new in sizes]
    rows = [(shape.kv_heads, shape.key_width), (shape.kv_heads, shape.value_width)]
    segments = kv_segments(rows, block_size, shape.dtype, shape.kv_cache_dtype)
    kv = BlockMemory(MemoryLayout(segments), 1 + sum(num_blocks))
    for segment in kv.segments:
        segment.fill_(UNWRITTEN)
    ids = (torch.randperm(sum(num_blocks), generator=generator) + 1).split(num_blocks)
    slots = [
        table[torch.arange(sum(size)) // block_size] * block_size + torch.arange(sum(size)) % block_size
        for table, size in zip(ids, sizes, strict=True)
    ]
    contexts = [(random(sum(size), shape.key_width), random(sum(size), shape.value_width)) for size in sizes]
    cache = layer_cache(kv, 0)
    for own, (key, value), (context, _) in zip(slots, contexts, sizes, strict=True):
        cache.write(own[:context], key[:context], value[:context])
    width = max(num_blocks)
    lens = [sum(size) for size in sizes]
    batch = PagedBatch(
        kv,
        block_size,
        torch.cat([own[context:] for own, (context, _) in zip(slots, sizes, strict=True)]),
        [new for _, new in sizes],
        lens,
        torch.stack([torch.nn.functional.pad(table, (0, width - len(table))) for table in ids]),
        torch.tensor(lens),
        [
            [] if spans is Spans.NONE or new == 1 else [(max(0, context - 2), context + new)]
            for context, new in sizes
        ],
        windowed_spans=spans is Spans.WITH_WINDOW,
    )
    new_key, new_value = (
        torch.cat([both[i][context:] for both, (context, _) in zip(contexts, sizes, strict=True)])
        for i in (0, 1)
    )
    query = torch.randn(len(batch.slots), shape.heads, shape.key_width, generator=generator).to(shape.dtype)
    return Step(batch, cache, query, new_key, new_value, contexts)


def run(backend: AttentionBackend, step: Step, layer: LayerAttention) -> Tensor:
    backend.write(step.batch, step.cache, step.key, step.value)
    return backend.attend(step.batch, layer, step.query, step.key, step.value, step.cache)


def dense(shape: Shape, step: Step, layer: LayerAttention) -> Tensor:
    """[T, Hq, Dv] in float32, from softmax over all positions."""
    outs, start = [], 0
    for i, (key, value) in enumerate(step.contexts):
        if shape.kv_cache_dtype == "int8":
            key, value = (dequantise(*quantise(rows), shape.dtype) for rows in (key, value))
        query = step.query[start : start + step.batch.query_lens[i]]
        is_causal = step.batch.windowed_spans and layer.sliding_window is None
        spans = () if is_causal else step.batch.bidirectional_spans[i]
        outs.append(dense_sequence(layer, query, key, value, spans))
        start += len(query)
    return torch.cat(outs)


def dense_sequence(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span] = ()
) -> Tensor:
    """query [n, Hq, D] are the last n of the S positions in key [S, Hk, D] and value [S, Hk, Dv]. Returns
    [n, Hq, Dv] float32: causal, and within `spans` bidirectional."""
    n, total, group = len(query), len(key), query.shape[1] // key.shape[1]
    q_pos = torch.arange(total - n, total, device=query.device)[:, None]
    k_pos = torch.arange(total, device=query.device)[None]
    visible = k_pos <= q_pos
    for start, end in spans:
        visible = visible | ((q_pos >= start) & (q_pos < end) & (k_pos >= start) & (k_pos < end))
    if layer.sliding_window is not None:
        visible = visible & (k_pos > q_pos - layer.sliding_window)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float().repeat_interleave(group, 1))
    scores = scores * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks.float().view(-1, 1, 1).expand(-1, n, 1)], -1)
    probs = scores.softmax(-1)[..., :total]
    return torch.einsum("hqk,khd->qhd", probs, value.float().repeat_interleave(group, 1))
