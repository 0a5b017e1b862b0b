"""Which tokens of which prompts run in a step. Pure.

First come, first served under a token budget; a prompt that waits for embeddings is passed over and loses nothing, since
what is computed stays computed. Where the model sees a media span in both directions (`uncut_spans`), a chunk ends before
a span or contains it whole, whatever the budget says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # [start, end) in prompt tokens


@dataclass(frozen=True)
class Candidate:
    """What the scheduler may know of one prompt. All counts in tokens."""

    request_id: str
    num_computed_tokens: int
    num_ready_tokens: int  # [num_computed_tokens, num_ready_tokens) can run now
    uncut_spans: Sequence[Span] = ()


@dataclass(frozen=True)
class Chunk:
    request_id: str
    num_scheduled_tokens: int


def schedule(candidates: Iterable[Candidate], max_batch_tokens: int) -> list[Chunk]:
    """At most `max_batch_tokens` in total, unless the first chunk is one span that may not be cut."""
    chunks: list[Chunk] = []
    budget = max_batch_tokens
    for candidate in candidates:
        if budget <= 0:
            break
        start = candidate.num_computed_tokens
        wanted_end = min(candidate.num_ready_tokens, start + budget)
        end = cut(start, wanted_end, candidate.uncut_spans, may_exceed=not chunks)
        if end > start:
            chunks.append(Chunk(candidate.request_id, end - start))
            budget -= end - start
    return chunks


def cut(start: int, end: int, uncut_spans: Sequence[Span], *, may_exceed: bool) -> int:
    """The nearest legal chunk end at or below `end`; if that leaves nothing and `may_exceed`, the span's own end."""
    for span_start, span_end in uncut_spans:
        if span_start < end < span_end:
            if span_start > start:
                return span_start
            return span_end if may_exceed else start
    return end


def usable_prefix(
    num_cached_tokens: int, num_prompt_tokens: int, block_size: int, uncut_spans: Sequence[Span]
) -> int:
    """How much of a cached prefix can be used, in tokens: whole blocks, at least one token left to compute (it gives the
    logits), no span cut."""
    usable = min(num_cached_tokens, (num_prompt_tokens - 1) // block_size * block_size)
    for span_start, span_end in reversed(uncut_spans):
        if span_start < usable < span_end:
            usable = span_start // block_size * block_size
    return usable
