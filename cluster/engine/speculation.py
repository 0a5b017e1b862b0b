"""Speculative decoding: guesses the next tokens of a sequence, so that one forward of the model can confirm
several of them.

The answers do not change. A drawn token depends on (logits, sampling parameters, seed, position) alone
(`cluster.model.sampling`). So a step
1. runs the target model over [last token, draft 1 … draft k] (`LanguageModel.forward`);
2. draws a token at every position with the ordinary `sample`;
3. appends drawn tokens as long as the draft before them is the token that was drawn there (`accept`).

These are the tokens that decoding without drafts draws with the same seed. A draft changes how soon tokens
come, not which tokens. (If logits are equal: in bf16, verification sums in another order and can decide
near-ties differently, as another batch size can.)

How often a draft is right: a fixed guess x with probability p(x), the most that rejection sampling can reach
for it (Leviathan et al. 2023; Chen et al. 2023); a draft model that draws with the target's noise as Gumbel
coupling predicts (Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant
speculative decoding").

The engine uses `Speculator`: propose → verify → observe in each step, and forget when a request ends. All of
it runs on the engine's thread. Owns the n-gram indices, the draft model's KV and its block pool. Heads that
read the target's hidden rows: `head_drafts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from cluster.config.combinations import check_vocabularies
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.graphs import Recording
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from cluster.model.step_model import StepModel
from cluster.types.request import SamplingParams


class DraftedSequence(Protocol):
    """What a proposer reads of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt (placeholders included) and everything generated. Grows at its end only."""
        ...

    @property
    def sampling(self) -> SamplingParams: ...


@dataclass(frozen=True)
class KnownTokens:
    """Successive tokens of one sequence that a step has computed, and that will not change."""

    sequence: DraftedSequence
    hashes: Sequence[bytes]  # of the sequence's full blocks; grows with it. Empty: its blocks are not shared
    first_token: int  # index in the sequence
    first_row: int  # in the step
    count: int
    is_prompt: bool


class RowReader(Protocol):
    def take(self, known: Iterable[KnownTokens]) -> None:
        """The last step has computed these tokens; it keeps their hidden rows until the next one."""
        ...


class Proposer(Protocol):
    def propose(self, sequences: Sequence[DraftedSequence], max_tokens: Sequence[int]) -> list[list[int]]:
        """Guesses of the tokens that follow each sequence: at most max_tokens[i] (0 or more), possibly
        none."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended: drop its state. Unknown requests are ignored."""
        ...


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens to append. drawn[i], for i in 0 … len(drafts): the target's draw after the last token and
    drafts[:i]. A drawn token is valid if all drafts before it were right. So the last token returned is new,
    and the tokens before it are drafts."""
    return list(drawn[: num_equal(drafts, drawn) + 1])


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


REST_STEPS = 16  # without a draft, after a draft of one token was wrong; then one token is tried again


@dataclass
class _DraftLength:
    """How many tokens are drafted for one request. 0: the request rests."""

    num_tokens: int
    rest_steps: int = 0


class Speculator:
    """A proposer, and the draft length of every request:
    * after a draft that was right to its end: one more token;
    * after a draft whose first token was wrong: half as many;
    * after a draft of a single wrong token: none for `REST_STEPS` steps."""

    def __init__(self, proposer: Proposer, max_draft_tokens: int, reader: RowReader | None = None):
        """`reader`: is given every step's tokens, if drafts depend on their hidden rows."""
        self._proposer = proposer
        self.reader = reader
        self.max_draft_tokens = max_draft_tokens
        self._lengths: dict[str, _DraftLength] = {}

    def propose(self, sequences: Sequence[DraftedSequence], room: Sequence[int]) -> list[list[int]]:
        """One draft per sequence, possibly empty, of at most room[i] tokens. A step appends one token more
        than its draft has, so room is one less than what the request may still generate. Call once per
        step."""
        limits = [
            min(self._next_length(s.request_id), limit) for s, limit in zip(sequences, room, strict=True)
        ]
        drafts: list[list[int]] = [[] for _ in sequences]
        rows = [row for row, limit in enumerate(limits) if limit > 0]
        proposed = self._proposer.propose([sequences[row] for row in rows], [limits[row] for row in rows])
        for row, draft in zip(rows, proposed, strict=True):
            drafts[row] = draft
        return drafts

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Reports how many tokens of a draft were accepted. Empty drafts may be left out. Requests that have
        ended are ignored."""
        length = self._lengths.get(request_id)
        if length is None or num_drafted == 0:
            return
        if num_accepted == num_drafted:
            length.num_tokens = min(length.num_tokens + 1, self.max_draft_tokens)
        elif num_accepted == 0:
            length.num_tokens //= 2
            length.rest_steps = REST_STEPS

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown requests are ignored."""
        self._lengths.pop(request_id, None)
        self._proposer.forget(request_id)

    def _next_length(self, request_id: str) -> int:
        length = self._lengths.setdefault(request_id, _DraftLength(self.max_draft_tokens))
        if length.num_tokens == 0:
            length.rest_steps -= 1
            length.num_tokens = int(length.rest_steps == 0)
        return length.num_tokens


GRAM_SIZES = (4, 3, 2)
MAX_HISTORY = 32_768
MAX_CHUNK_TOKENS = 512  # of prompts that a draft model computes beside drafts, all requests together


@dataclass
class _NgramIndex:
    """continuation[gram]: index of the token that followed the last occurrence of `gram` in the sequence."""

    num_indexed: int  # tokens that are indexed as a continuation
    continuation: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramProposer:
    """Prompt lookup (Saxena 2023): proposes what followed the last occurrence of the longest suffix that
    occurred before, of `GRAM_SIZES` tokens. If the occurrence overlaps the suffix, the draft repeats.

    A token is indexed once, with an entry for each size. When a request is first seen, at most its last
    `MAX_HISTORY` tokens are indexed. Never proposes `forbidden` ids (placeholders of media): a draft ends
    before them."""

    def __init__(self, forbidden: Collection[int] = ()):
        self._forbidden = frozenset(forbidden)
        self._indices: dict[str, _NgramIndex] = {}

    def propose(self, sequences: Sequence[DraftedSequence], max_tokens: Sequence[int]) -> list[list[int]]:
        return [self._draft(s, limit) for s, limit in zip(sequences, max_tokens, strict=True)]

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def _draft(self, sequence: DraftedSequence, max_tokens: int) -> list[int]:
        token_ids = sequence.token_ids
        continuation = self._index(sequence.request_id, token_ids).continuation
        start = next(
            (end for gram in self._grams(token_ids, len(token_ids)) if (end := continuation.get(gram))), None
        )
        if start is None:
            return []
        period = len(token_ids) - start
        draft: list[int] = []
        for i in range(max_tokens):
            token = token_ids[start + i] if i < period else draft[i - period]
            if token in self._forbidden:
                break
            draft.append(token)
        return draft

    def _index(self, request_id: str, token_ids: Sequence[int]) -> _NgramIndex:
        """The index of the request, brought up to the last token that may be a continuation."""
        index = self._indices.get(request_id)
        if index is None:
            first = max(0, len(token_ids) - MAX_HISTORY)
            index = self._indices[request_id] = _NgramIndex(first)
        for end in range(index.num_indexed, len(token_ids)):
            for gram in self._grams(token_ids, end):
                index.continuation[gram] = end
        index.num_indexed = len(token_ids)
        return index

    def _grams(self, token_ids: Sequence[int], end: int) -> list[tuple[int, ...]]:
        """The n-grams before index `end`, longest first."""
        return [tuple(token_ids[end - size : end]) for size in GRAM_SIZES if size <= end]


@dataclass
class _DraftKv:
    """What the draft model holds of one request: the KV of the first `num_computed_tokens` tokens. After a
    draft also, behind those, the KV of all guessed tokens but the last."""

    has_media: bool
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    guessed: list[int] = field(default_factory=list)

    def confirm(self, token_ids: Sequence[int]) -> None:
        """Keeps the KV of guesses that were right. Wrong ones are overwritten later. The last token is always
        left to compute, because a draft starts from its logits."""
        if self.guessed:
            kept = num_equal(self.guessed[:-1], token_ids[self.num_computed_tokens :])
            self.num_computed_tokens = min(self.num_computed_tokens + kept, len(token_ids) - 1)
            self.guessed = []


@dataclass(frozen=True)
class _DraftJob:
    """One request in one call."""

    sequence: DraftedSequence
    max_tokens: int
    held: _DraftKv

    @property
    def num_missing(self) -> int:
        """Tokens without KV, at least 1."""
        return len(self.sequence.token_ids) - self.held.num_computed_tokens


class DraftModelProposer:
    """A second, smaller language model on the same device, with KV blocks of its own.

    Draws with each request's own sampling parameters and noise, so its guess is the target's token whenever
    both would draw the same. When a draft is requested, it first computes the KV that it lacks, at most
    `MAX_CHUNK_TOKENS` of all requests at a time: a long prompt takes several steps, in which the other
    requests get their drafts. No draft for requests with media (the draft model has no embeddings), beyond
    its own context length, or while there are no blocks. A request that cannot grow frees its blocks."""

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        num_blocks: int,
        placeholders: Collection[int] = (),
        recording: Recording | None = None,
    ):
        """`recording`: of the draft model's steps. Raises ConfigError if the two models do not share a
        vocabulary."""
        check_vocabularies(draft.vocab_size, target.vocab_size)
        self._model = draft
        num_padding = 0 if recording is None else recording.num_blocks
        self._kv = BlockMemory(draft.kv_layout, num_blocks + num_padding, draft.device)
        self._steps: StepModel = draft if recording is None else recording.over(draft, self._kv)
        self.blocks = BlockPool(num_blocks, draft.block_size)
        self._placeholders = frozenset(placeholders)
        self._held: dict[str, _DraftKv] = {}

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftedSequence], max_tokens: Sequence[int]) -> list[list[int]]:
        """Blocks; synchronises the device."""
        jobs = [
            _DraftJob(s, limit, self._kv_of(s))
            for s, limit in zip(sequences, max_tokens, strict=True)
            if limit > 0
        ]
        complete, logits = self._catch_up([job for job in jobs if self._make_room(job)])
        if complete:
            self._draw(complete, logits)
        drafted = {job.sequence.request_id: list(job.held.guessed) for job in complete}
        return [drafted.get(s.request_id, []) for s in sequences]

    def forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self.blocks.free(held.block_table)

    def _kv_of(self, sequence: DraftedSequence) -> _DraftKv:
        held = self._held.get(sequence.request_id)
        if held is None:
            held = _DraftKv(has_media=not self._placeholders.isdisjoint(sequence.token_ids))
            self._held[sequence.request_id] = held
        return held

    def _make_room(self, job: _DraftJob) -> bool:
        """Whether the request can have its draft. If so, its block table is long enough for it."""
        held, token_ids = job.held, job.sequence.token_ids
        if held.has_media:
            return False
        held.confirm(token_ids)
        num_tokens = len(token_ids) + job.max_tokens - 1  # the last guess needs no KV
        num_missing = max(0, -(-num_tokens // self.blocks.block_size) - len(held.block_table))
        more = self.blocks.try_allocate(num_missing) if num_tokens <= self._model.max_model_len else None
        if more is None:
            self.blocks.free(held.block_table)
            held.block_table, held.num_computed_tokens = [], 0
            return False
        held.block_table += more
        return True

    def _catch_up(self, jobs: Sequence[_DraftJob]) -> tuple[list[_DraftJob], Tensor]:
        """Computes missing KV, of the request that lacks least first. Returns the jobs that lack none now,
        and the [n, vocab_size] logits of what follows them."""
        chunks: list[SequenceChunk] = []
        complete: list[_DraftJob] = []
        budget = MAX_CHUNK_TOKENS
        for job in sorted(jobs, key=lambda job: job.num_missing):
            count = min(job.num_missing, budget)
            if count == 0:
                break
            start, end = job.held.num_computed_tokens, job.held.num_computed_tokens + count
            token_ids = job.sequence.token_ids[start:end]
            chunks.append(SequenceChunk(token_ids, start, start, job.held.block_table))
            job.held.num_computed_tokens = end
            budget -= count
            if job.num_missing == 0:
                complete.append(job)
        if not chunks:
            return [], torch.empty(0)
        return complete, self._steps.forward(chunks, self._kv)[: len(complete)]

    def _draw(self, jobs: Sequence[_DraftJob], logits: Tensor) -> None:
        """Guesses for every job, one token of each job per round. logits: [len(jobs), vocab_size], of the
        first round."""
        while True:
            contexts = [job.held.num_computed_tokens + len(job.held.guessed) for job in jobs]
            tokens = sample(logits, [job.sequence.sampling for job in jobs], contexts)
            for job, token in zip(jobs, tokens, strict=True):
                job.held.guessed.append(token)
            jobs = [job for job in jobs if len(job.held.guessed) < job.max_tokens]
            if not jobs:
                return
            logits = self._steps.decode(
                [job.held.guessed[-1] for job in jobs],
                [job.held.num_computed_tokens + len(job.held.guessed) - 1 for job in jobs],
                [0] * len(jobs),
                [job.held.block_table for job in jobs],
                self._kv,
            )
