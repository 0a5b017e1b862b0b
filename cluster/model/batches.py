"""How the sequences of one step become one packed batch.

Pure functions of token counts and block tables; no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.errors import InternalError
from cluster.kvcache.memory import BlockMemory
from cluster.model.attention import PagedBatch, Span


@dataclass(frozen=True)
class FeatureSlice:
    """Embedding rows that replace placeholder tokens of a chunk."""

    start: int  # first row inside the chunk
    rows: Tensor  # [n, feature_width]


@dataclass(frozen=True)
class SequenceChunk:
    """One sequence's share of a packed forward: its next n tokens."""

    token_ids: Sequence[int]  # n new tokens
    position_ids: Tensor  # [n] or [3, n]
    num_computed_tokens: int  # tokens of this sequence whose KV is in the block memory
    block_table: Sequence[int]  # block ids that cover num_computed_tokens + n tokens
    features: tuple[FeatureSlice, ...] = ()
    # absolute [start, end) of all media in the prompt whose tokens see each other
    bidirectional_spans: tuple[Span, ...] = ()
    num_logits: int = 1  # how many of its last tokens want logits; 0: further chunks of the prompt follow


def decode_batch(
    context_lens: Sequence[int], block_tables: Sequence[Sequence[int]], kv: BlockMemory, block_size: int,
    device: torch.device,
) -> PagedBatch:  # fmt: skip
    """One new token for each sequence, behind `context_lens[i]` others."""
    contexts = torch.tensor(context_lens)
    tables = _padded_tables(block_tables, max(context_lens) // block_size + 1)
    blocks = tables.gather(1, (contexts // block_size)[:, None])[:, 0]
    return PagedBatch(
        kv,
        block_size,
        slots=(blocks * block_size + contexts % block_size).to(device),
        query_lens=[1] * len(context_lens),
        context_lens=[context + 1 for context in context_lens],
        block_tables=tables.to(device),
        context_lens_tensor=(contexts + 1).to(device),
        bidirectional_spans=(),
    )


def packed_batch(
    chunks: Sequence[SequenceChunk], kv: BlockMemory, block_size: int, device: torch.device,
    on_layer: Callable[[int], None] | None,
) -> PagedBatch:  # fmt: skip
    """The new tokens of all chunks, chunk after chunk."""
    longest = max(len(chunk.block_table) for chunk in chunks)
    tables = _padded_tables([chunk.block_table for chunk in chunks], longest)
    query_lens = [len(chunk.token_ids) for chunk in chunks]
    context_lens = [chunk.num_computed_tokens + n for chunk, n in zip(chunks, query_lens, strict=True)]
    slots, spans = [], []
    for chunk, context_len, table in zip(chunks, context_lens, tables, strict=True):
        indices = torch.arange(chunk.num_computed_tokens, context_len)
        slots.append(table[indices // block_size] * block_size + indices % block_size)
        spans.append(_visible_spans(chunk, context_len))
    return PagedBatch(
        kv,
        block_size,
        slots=torch.cat(slots).to(device),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables.to(device),
        context_lens_tensor=torch.tensor(context_lens, device=device),
        bidirectional_spans=spans,
        on_layer=on_layer,
    )


def _visible_spans(chunk: SequenceChunk, context_len: int) -> list[Span]:
    """The spans that overlap this chunk. Raises InternalError for a span that goes on behind it: its KV would
    be wrong."""
    spans = [
        (a, b) for a, b in chunk.bidirectional_spans if a < context_len and b > chunk.num_computed_tokens
    ]
    if any(end > context_len for _, end in spans):
        raise InternalError(
            "a prefill chunk ends inside a media span that this model sees in both directions"
        )
    return spans


def _padded_tables(block_tables: Sequence[Sequence[int]], width: int) -> Tensor:
    """[B, width] int64 on the CPU. Each table is cut to `width` (it may reserve blocks for later) or padded
    with block 0, which the masks hide."""
    padding = (0,) * width
    rows = [[*table[:width], *padding[len(table) :]] for table in block_tables]
    return torch.from_numpy(np.array(rows, dtype=np.int64))  # in a quarter of torch.tensor's time
