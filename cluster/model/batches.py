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
from cluster.model.attention import PagedBatch, Span, StepTensors
from cluster.model.cuda.uploads import upload_as_they_are
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
    """The T new tokens of all chunks, chunk after chunk. On the device."""

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] or [3, T]
    wanted: Tensor  # [sum of num_logits] int64: which of the T tokens want logits
    adapters: Tensor | None  # [T] int64: of each token its adapter's number, or 0; None: no token has one
    batch: PagedBatch


def decode_step(
    token_ids: np.ndarray | Tensor, context_lens: Sequence[int], deltas: Sequence[int],
    block_tables: Sequence[Sequence[int]], adapters: Sequence[int], kv: BlockMemory, block_size: int,
    device: torch.device,
) -> PackedStep:  # fmt: skip
    """One new token for each sequence, behind `context_lens[i]` others. token_ids: as the embedding reads
    them; a tensor is on the device."""
    contexts, rows = np.array(context_lens), np.arange(len(context_lens))
    tokens = PackedTokens(
        [], torch.from_numpy(contexts + np.array(deltas)), np.ones_like(contexts), contexts, rows, contexts,
        rows, np.array(adapters, dtype=np.int64),
    )  # fmt: skip
    spans = [()] * len(rows)
    return _packed_step(token_ids, tokens, block_tables, spans, kv, block_size, device)


def packed_step(
    chunks: Sequence[SequenceChunk], kv: BlockMemory, block_size: int, device: torch.device,
    known_ids: Callable[[Sequence[int]], np.ndarray] = np.array,
) -> PackedStep:  # fmt: skip
    """A few array operations for the whole step: many chunks of one token take as long as `decode_step`
    and some. known_ids: the ids of tokens as the embedding reads them."""
    tokens = packed_tokens(chunks)
    tables = [chunk.block_table for chunk in chunks]
    return _packed_step(
        known_ids(tokens.token_ids), tokens, tables, visible_spans(chunks), kv, block_size, device
    )


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


def _packed_step(
    token_ids: np.ndarray | Tensor, tokens: PackedTokens, block_tables: Sequence[Sequence[int]],
    spans: Sequence[Sequence[Span]], kv: BlockMemory, block_size: int, device: torch.device,
) -> PackedStep:  # fmt: skip
    """Everything that lies on a GPU goes there in one copy."""
    contexts = tokens.computed + tokens.counts
    padded = _padded_tables(block_tables, int(contexts.max() - 1) // block_size + 1)
    slots = padded[tokens.seqs, tokens.indices // block_size] * block_size + tokens.indices % block_size
    numbers = {
        "positions": tokens.position_ids.numpy(), "wanted": tokens.wanted, "slots": slots, "tables": padded,
        "contexts": contexts,
    }  # fmt: skip
    if not isinstance(token_ids, Tensor):
        numbers["tokens"] = token_ids
    if tokens.adapters.any():
        numbers["adapters"] = tokens.adapters
    of_kernels = step_numbers(tokens.counts, contexts, spans) if device.type == "cuda" else ()
    sent = upload_as_they_are([*numbers.values(), *of_kernels], device)
    named = dict(zip(numbers, sent, strict=False))
    batch = PagedBatch(
        kv,
        block_size,
        slots=named["slots"],
        query_lens=tokens.counts.tolist(),
        context_lens=contexts.tolist(),
        block_tables=named["tables"],
        context_lens_tensor=named["contexts"],
        bidirectional_spans=spans,
    )
    if of_kernels:
        of_step = sent[len(numbers) :]
        tables = named["tables"].int()
        batch.memo["step",] = StepTensors(*of_step, tables, block_size, batch.is_decode)
    known = token_ids if isinstance(token_ids, Tensor) else named["tokens"]
    return PackedStep(known, named["positions"], named["wanted"], named.get("adapters"), batch)


def step_numbers(
    counts: np.ndarray, contexts: np.ndarray, spans: Sequence[Sequence[Span]]
) -> list[np.ndarray]:
    """Returns what `StepTensors` begins with, for sequences with so many new tokens and, with these, so many
    positions. Sequence i has row i of the tables."""
    starts = np.concatenate([[0], counts.cumsum()])
    seqs = np.repeat(np.arange(len(counts)), counts)
    indices = np.arange(starts[-1]) - starts[seqs] + (contexts - counts)[seqs]
    ends = visible_ends(indices, starts, spans)
    numbers = seqs, indices, ends, starts, contexts, np.arange(len(counts))
    return [each.astype(np.int32) for each in numbers]


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
