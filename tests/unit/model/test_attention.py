"""The torch backend against a plain softmax over all positions, for every feature, in decode and in prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.attention_torch import TorchAttention
from cluster.model.kv_format import layer_cache

HEADS, KV_HEADS, K_WIDTH, V_WIDTH = 4, 2, 8, 6
UNWRITTEN = 1e4


def dense(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, spans: list[tuple[int, int]]
) -> Tensor:
    """query [n, Hq, D] are the last n of the S positions in key [S, Hk, D] and value [S, Hk, Dv]."""
    n, total = len(query), len(key)
    q_pos, k_pos = torch.arange(total - n, total)[:, None], torch.arange(total)[None]
    visible = k_pos <= q_pos
    for start, end in spans:
        visible = visible | ((q_pos >= start) & (q_pos < end) & (k_pos >= start) & (k_pos < end))
    if layer.sliding_window is not None:
        visible = visible & (k_pos > q_pos - layer.sliding_window)
    group = HEADS // KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks.view(-1, 1, 1).expand(-1, n, 1)], -1)
    probs = scores.softmax(-1)[..., :total]
    return torch.einsum("hqk,khd->qhd", probs, value.repeat_interleave(group, 1))


layers = st.builds(
    lambda window, softcap, sinks: LayerAttention(
        0.3, window, softcap, torch.linspace(-1, 1, HEADS) if sinks else None
    ),
    st.sampled_from([None, 1, 3, 4, 5, 16, 1000]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)


@settings(max_examples=120, deadline=None)
@given(
    layer=layers,
    sizes=st.lists(st.tuples(st.integers(0, 23), st.integers(1, 9)), min_size=1, max_size=4),
    decode=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    spans=st.booleans(),
)
def test_paged_attention_equals_dense_attention(
    layer: LayerAttention, sizes: list[tuple[int, int]], decode: bool, block_size: int, spans: bool
) -> None:
    if decode:
        sizes = [(context, 1) for context, _ in sizes]
    generator = torch.Generator().manual_seed(0)
    segments = tuple(
        SegmentSpec(block_size, (KV_HEADS, width), torch.float32) for width in (K_WIDTH, V_WIDTH)
    )
    kv = BlockMemory(MemoryLayout(segments), 1 + sum(-(-(c + n) // block_size) for c, n in sizes))
    for segment in kv.segments:
        segment.fill_(UNWRITTEN)
    tables, slots, queries, expected, next_block, seq_spans, new = [], [], [], [], 1, [], []
    for context, n in sizes:
        total = context + n
        table = list(range(next_block, next_block + -(-total // block_size)))[::-1]
        next_block += len(table)
        where = torch.tensor(table).repeat_interleave(block_size)[:total] * block_size
        where = where + torch.arange(total) % block_size
        key, value, query = (
            torch.randn(count, heads, width, generator=generator)
            for count, heads, width in (
                (total, KV_HEADS, K_WIDTH),
                (total, KV_HEADS, V_WIDTH),
                (n, HEADS, K_WIDTH),
            )
        )
        kv.segments[0].flatten(0, 1)[where] = key
        kv.segments[1].flatten(0, 1)[where] = value
        own = [(max(0, context - 2), total)] if spans and not decode else []
        expected.append(dense(layer, query, key, value, own))
        tables.append(table)
        slots.append(where[context:])
        queries.append(query)
        seq_spans.append(own)
        new.append((key[context:], value[context:]))
    width = max(map(len, tables))
    lens = [context + n for context, n in sizes]
    batch = PagedBatch(
        kv, block_size, torch.cat(slots), [n for _, n in sizes], lens,
        torch.tensor([[*table, *[0] * (width - len(table))] for table in tables]), torch.tensor(lens), seq_spans,
    )  # fmt: skip
    new_key, new_value = (torch.cat(parts) for parts in zip(*new, strict=True))
    out = TorchAttention().attend(batch, layer, torch.cat(queries), new_key, new_value, layer_cache(kv, 0))
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_scratch_of_one_step_does_not_leak_into_the_next() -> None:
    backend = TorchAttention()
    blocks = torch.arange(24.0).view(6, 2, 2, 1)
    large = backend._gather("key", blocks, torch.tensor([0, 1, 2, 3])).clone()
    small = backend._gather("key", blocks, torch.tensor([5]))
    assert torch.equal(large, blocks[:4])
    assert torch.equal(small, blocks[5:])


def test_a_backbone_that_is_run_from_elsewhere_says_so() -> None:
    from cluster.model.attention import paged_attention

    with pytest.raises(RuntimeError, match="through LanguageModel"):
        paged_attention(torch.nn.Identity(), *[torch.zeros(1, 1, 1, 1)] * 3, None)
