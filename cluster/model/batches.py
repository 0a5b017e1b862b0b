"""How the sequences of one step become one packed batch.

A step holds sequences of any kind side by side: one token of a running answer, a token and the drafts behind
it, a chunk of a prompt with embedding rows. Pure functions of token counts and block tables; no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from cluster.errors import InternalError
from cluster.kvcache.memory import BlockMemory
from cluster.model.attention import PagedBatch, Span
from cluster.model.logprobs import PromptScores
from cluster.model.states import StateSpan


@dataclass(frozen=True)
class FeatureSlice:
    """Embedding rows that replace placeholder tokens of a chunk."""

    start: int  # first row inside the chunk
    rows: Tensor  # [n, feature_width]


class SequenceChunk(msgspec.Struct, frozen=True, eq=False):
    """One sequence's share of a packed forward: its next n tokens. A struct, because a step makes one for
    every running answer: a frozen dataclass takes nine times as long."""

    token_ids: Sequence[int]  # n new tokens
    # [n] or [3, n]; an int is the first of n successive positions, on every axis
    position_ids: Tensor | int
    num_computed_tokens: int  # tokens of this sequence whose KV is in the block memory
    # block ids that cover num_computed_tokens + n tokens; quickest as an `array("q")`
    block_table: Sequence[int]
    features: tuple[FeatureSlice, ...] = ()
    # absolute [start, end) of all media in the prompt whose tokens see each other
    bidirectional_spans: tuple[Span, ...] = ()
    num_logits: int = 1  # how many of its last tokens want logits; 0: further chunks of the prompt follow
    scores: PromptScores | None = None  # of its tokens; the forward fills it in
    adapter: int = 0  # its number, from 1 on; 0: none
    # of a hybrid model: its tokens again, with the sequence's state; empty: of a new one, and nothing is kept
    states: tuple[StateSpan, ...] = ()


@dataclass(frozen=True)
class PackedTokens:
    """The T new tokens of B chunks, chunk after chunk. On the CPU."""

    token_ids: list[int]
    position_ids: Tensor  # [T] or [axes, T]
    counts: np.ndarray  # [B]: new tokens
    computed: np.ndarray  # [B]: tokens before them
    seqs: np.ndarray  # [T]: which chunk
    indices: np.ndarray  # [T]: index among the sequence's positions
    wanted: np.ndarray  # [sum of num_logits]: which of the T tokens want logits
    adapters: np.ndarray  # [T]


@dataclass(frozen=True)
class PackedStep:
    """The T new tokens of all chunks, chunk after chunk."""

    token_ids: list[int]
    position_ids: Tensor  # [T] or [3, T], on the CPU
    wanted: Tensor  # [sum of num_logits] int64, on the CPU: which of the T tokens want logits
    batch: PagedBatch
    adapters: np.ndarray  # [T]: of each token its adapter's number, or 0


def decode_batch(
    context_lens: Sequence[int], block_tables: Sequence[Sequence[int]], kv: BlockMemory, block_size: int,
    device: torch.device,
) -> PagedBatch:  # fmt: skip
    """One new token for each sequence, behind `context_lens[i]` others."""
    contexts = np.array(context_lens)
    rows = np.arange(len(contexts))
    return _paged_batch(
        contexts, np.ones_like(contexts), contexts, rows, block_tables, kv, block_size, device
    )


def packed_step(
    chunks: Sequence[SequenceChunk], kv: BlockMemory, block_size: int, device: torch.device,
    on_layer: Callable[[int], None] | None,
) -> PackedStep:  # fmt: skip
    """A few array operations for the whole step: many chunks of one token take as long as `decode_batch`
    and some."""
    tokens = packed_tokens(chunks)
    tables = [chunk.block_table for chunk in chunks]
    batch = _paged_batch(
        tokens.computed, tokens.counts, tokens.indices, tokens.seqs, tables, kv, block_size, device
    )
    batch.on_layer = on_layer
    batch.bidirectional_spans = visible_spans(chunks)
    wanted = torch.from_numpy(tokens.wanted)
    return PackedStep(tokens.token_ids, tokens.position_ids, wanted, batch, tokens.adapters)


def packed_tokens(chunks: Sequence[SequenceChunk]) -> PackedTokens:
    given = [chunk.position_ids for chunk in chunks]
    numbers = [
        (
            len(chunk.token_ids),
            chunk.num_computed_tokens,
            0 if isinstance(ids, Tensor) else ids,
            chunk.num_logits,
            chunk.adapter,
        )
        for chunk, ids in zip(chunks, given, strict=True)
    ]
    counts, computed, firsts, num_logits, adapters = np.array(numbers).T
    ends = counts.cumsum()
    seqs = np.repeat(np.arange(len(counts)), counts)
    new = np.arange(ends[-1]) - (ends - counts)[seqs]  # each token's index in its chunk
    return PackedTokens(
        [token for chunk in chunks for token in chunk.token_ids],
        _with_tensors(torch.from_numpy(firsts[seqs] + new), given, ends),
        counts,
        computed,
        seqs,
        computed[seqs] + new,
        np.nonzero(new >= (counts - num_logits)[seqs])[0],
        adapters[seqs],
    )


def visible_spans(chunks: Sequence[SequenceChunk]) -> list[Sequence[Span]]:
    """For each chunk, the spans that overlap it. Raises InternalError for a span that goes on behind its
    chunk: its KV would be wrong."""
    return [_spans_of(chunk) if chunk.bidirectional_spans else () for chunk in chunks]


def _with_tensors(positions: Tensor, given: Sequence[Tensor | int], ends: np.ndarray) -> Tensor:
    """positions [T]; where a chunk has a tensor, replaced by it. Returns [T] or [3, T] in the type of these
    tensors."""
    tensors = [(ids, int(end)) for ids, end in zip(given, ends, strict=True) if isinstance(ids, Tensor)]
    if not tensors:
        return positions
    dtype = torch.float32 if any(ids.is_floating_point() for ids, _ in tensors) else torch.int64
    axes = max((ids.shape[:-1] for ids, _ in tensors), key=len)
    positions = positions.to(dtype).expand(*axes, -1).clone()
    for ids, end in tensors:
        positions[..., end - ids.shape[-1] : end] = ids
    return positions


def _paged_batch(
    computed: np.ndarray, counts: np.ndarray, indices: np.ndarray, rows: np.ndarray,
    block_tables: Sequence[Sequence[int]], kv: BlockMemory, block_size: int, device: torch.device,
) -> PagedBatch:  # fmt: skip
    """counts[i] new tokens of each sequence, behind computed[i] others. Of each new token: `rows` its
    sequence, `indices` its index there."""
    contexts = computed + counts
    tables = _padded_tables(block_tables, int(contexts.max() - 1) // block_size + 1)
    slots = tables[rows, indices // block_size] * block_size + indices % block_size
    return PagedBatch(
        kv,
        block_size,
        slots=torch.from_numpy(slots).to(device),
        query_lens=counts.tolist(),
        context_lens=contexts.tolist(),
        block_tables=torch.from_numpy(tables).to(device),
        context_lens_tensor=torch.from_numpy(contexts).to(device),
        bidirectional_spans=[()] * len(contexts),
    )


def visible_ends(indices: np.ndarray, starts: np.ndarray, spans: Sequence[Sequence[Span]]) -> np.ndarray:
    """[T]: each new token sees the positions below this one: the next, or the end of its span. indices [T]:
    of the tokens in their sequences; those of sequence i are starts[i] to starts[i + 1]."""
    ends = indices + 1
    for seq, own_spans in enumerate(spans):
        for start, end in own_spans:
            own = slice(starts[seq], starts[seq + 1])
            inside = (indices[own] >= start) & (indices[own] < end)
            ends[own][inside] = end
    return ends


def _spans_of(chunk: SequenceChunk) -> list[Span]:
    context_len = chunk.num_computed_tokens + len(chunk.token_ids)
    spans = [
        (a, b) for a, b in chunk.bidirectional_spans if a < context_len and b > chunk.num_computed_tokens
    ]
    if any(end > context_len for _, end in spans):
        raise InternalError(
            "a prefill chunk ends inside a media span that this model sees in both directions"
        )
    return spans


def _padded_tables(block_tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """[B, width] int64. Each table is cut to `width` (it may reserve blocks for later) or padded with block
    0, which the masks hide. An `array("q")` is copied as it is; of another sequence each id is converted."""
    tables = np.zeros((len(block_tables), width), dtype=np.int64)
    for row, table in zip(tables, block_tables, strict=True):
        used = min(len(table), width)
        row[:used] = table[:used]
    return tables
