"""Drafts of a head that reads the target's hidden rows (`cluster.model.draft_head`): MTP, EAGLE-3.

    a step has run          `take` gets the hidden rows of the tokens that are known to be right. Of prompts
                            the head computes its rows at once
    before the next step    `propose`: the head computes its rows up to the last token, of all choices in one
                            call, then guesses a token of every choice in each further call

The head has KV of its own, in blocks of its own. They are found by the hashes of the target's blocks: a later
request with the same beginning, and the other choices of a request, share them. Where no rows are known
before a token (its KV came from another worker, or was cached here before the head ran), the choice's context
begins with that token's block, and the tokens of the block before it count with a hidden row of zeros. That
costs guesses, not answers.

Rows [first block * size, num_rows) of a choice are right; those behind are guesses, and are overwritten.
Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.engine.drawing import Choices
from cluster.engine.sequence import TokenSequence
from cluster.engine.speculation import DraftedSequence, KnownTokens
from cluster.engine.state import PromptWork
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.draw import to_device
from cluster.model.draft_head import DraftHead
from cluster.model.hidden_rows import HiddenRows
from cluster.model.language import SequenceChunk
from cluster.model.sampling import sample


def known_tokens(
    choices: Choices,
    num_rows: Sequence[int],
    accepted: Sequence[Sequence[int]],
    prompts: Sequence[PromptWork],
) -> Iterator[KnownTokens]:
    """Returns the tokens of one step. num_rows: per choice and sequence of it, its last token and its drafts.
    accepted: per choice, the tokens that it gets. Not of requests with guidance, which are not drafted for,
    and not of prompts that are sent."""
    row = 0
    for (_, choice), count, tokens in zip(choices, num_rows, accepted, strict=True):
        if len(choice.sequences) == 1:
            (sequence,) = choice.sequences
            start = sequence.num_computed_tokens
            first_row = row + sequence.num_unsettled_tokens  # these are known already
            yield KnownTokens(choice, _hashes_of(sequence), start, first_row, len(tokens), is_prompt=False)
        row += sum(sequence.num_unsettled_tokens + count for sequence in choice.sequences)
    for work in prompts:
        request, sequence = work.request, work.sequence
        if not request.sends and len(request.request.prompts) == 1 and not request.choices[0].is_done:
            start = sequence.num_computed_tokens
            hashes = _hashes_of(sequence)
            yield KnownTokens(request.choices[0], hashes, start, row, work.num_tokens, is_prompt=True)
        row += work.num_tokens


def _hashes_of(sequence: TokenSequence) -> Sequence[bytes]:
    return () if sequence.hashes is None else sequence.hashes.hashes


@dataclass
class _HeldRows:
    """What the head holds of one choice."""

    hashes: Sequence[bytes]
    first_block: int  # of the sequence, that the context begins with
    num_rows: int  # index of the first token without a row
    block_table: list[int]  # of the blocks from `first_block` on
    num_registered: int = 0  # prefix of the table that others can find
    pending: list[Tensor] = field(default_factory=list)  # hidden rows of the tokens from num_rows - 1 on …
    num_pending: int = 0  # … and how many these are

    @property
    def next_token(self) -> int:
        """Index of the first token whose hidden row is not known."""
        return self.num_rows - 1 + self.num_pending

    def add(self, rows: Tensor) -> None:
        self.pending.append(rows)
        self.num_pending += len(rows)

    def take_pending(self, count: int) -> list[Tensor]:
        """Returns the next `count` hidden rows, for which the head's rows are computed now."""
        taken: list[Tensor] = []
        self.num_rows, self.num_pending = self.num_rows + count, self.num_pending - count
        while count:
            rows = self.pending.pop(0)
            taken.append(rows[:count])
            if len(rows) > count:
                self.pending.insert(0, rows[count:])
            count -= len(taken[-1])
        return taken


@dataclass
class _Job:
    """One choice in one call of `propose`."""

    sequence: DraftedSequence
    max_tokens: int
    held: _HeldRows
    guessed: list[int] = field(default_factory=list)


class HeadProposer:
    """Draws guesses with each request's own sampling parameters and noise, as the target does. No draft while
    there are no blocks: the choice's context then begins again, later. A draft ends before `forbidden` tokens
    (placeholders of media)."""

    def __init__(self, head: DraftHead, rows: HiddenRows, num_blocks: int, forbidden: Collection[int] = ()):
        self._head, self._rows = head, rows
        self._kv = BlockMemory(head.kv_layout, num_blocks, head.device)
        self.blocks = BlockPool(num_blocks, head.block_size)
        self._forbidden = frozenset(forbidden)
        self._held: dict[str, _HeldRows] = {}

    @torch.inference_mode()
    def take(self, known: Iterable[KnownTokens]) -> None:
        """The last step has computed these tokens. On a GPU everything is enqueued."""
        fitting = [
            each for each in known if each.count and each.first_row + each.count <= self._rows.capacity
        ]
        if not fitting:
            return
        places = [row for each in fitting for row in range(each.first_row, each.first_row + each.count)]
        rows = self._head.fused(self._rows.take(places)).split([each.count for each in fitting])
        prompts: list[tuple[DraftedSequence, _HeldRows]] = []
        for each, own in zip(fitting, rows, strict=True):
            held = self._held.get(each.sequence.request_id)
            if held is None or held.next_token != each.first_token:
                held = self._begin(each)
            held.add(own)
            if each.is_prompt:
                prompts.append((each.sequence, held))
        self._catch_up([(s, held) for s, held in prompts if self._has_room(s, held, 0)], num_logits=0)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftedSequence], max_tokens: Sequence[int]) -> list[list[int]]:
        """Blocks; synchronises the device. No draft for a choice whose last step has not been taken in."""
        jobs = []
        for sequence, limit in zip(sequences, max_tokens, strict=True):
            held = self._held.get(sequence.request_id)
            if held is None or limit == 0 or held.next_token != len(sequence.token_ids) - 1:
                continue
            if held.num_pending and self._has_room(sequence, held, limit - 1):  # the last guess needs no row
                jobs.append(_Job(sequence, limit, held))
        if jobs:
            self._draw(jobs, *self._catch_up([(job.sequence, job.held) for job in jobs], num_logits=1))
        drafted = {job.sequence.request_id: self._allowed(job.guessed) for job in jobs}
        return [drafted.get(s.request_id, []) for s in sequences]

    def forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self.blocks.free(held.block_table)

    def _begin(self, known: KnownTokens) -> _HeldRows:
        """Nothing is held before these tokens, but for what other requests have left."""
        self.forget(known.sequence.request_id)
        size = self.blocks.block_size
        first_row = known.first_token + 1  # the first that the head can compute as it should be
        block = first_block = first_row // size
        shared: list[int] = []
        while first_block and first_block <= len(known.hashes):
            if not (found := self.blocks.lookup(known.hashes[first_block - 1 : first_block])):
                break
            shared, first_block = [*found, *shared], first_block - 1
        held = _HeldRows(known.hashes, first_block, block * size, shared, len(shared))
        if unknown := first_row - held.num_rows:
            held.add(
                torch.zeros(unknown, self._head.hidden_size, dtype=self._head.dtype, device=self._head.device)
            )
        self._held[known.sequence.request_id] = held
        return held

    def _has_room(self, sequence: DraftedSequence, held: _HeldRows, num_more: int) -> bool:
        """Whether there are blocks for all rows that can be computed now, and `num_more` guesses."""
        size = self.blocks.block_size
        num_tokens = min(len(sequence.token_ids), held.next_token + 1) + num_more
        num_missing = -(-num_tokens // size) - held.first_block - len(held.block_table)
        more = self.blocks.try_allocate(max(0, num_missing))
        if more is None:
            self.forget(sequence.request_id)
            return False
        held.block_table += more
        return True

    def _catch_up(
        self, jobs: Sequence[tuple[DraftedSequence, _HeldRows]], num_logits: int
    ) -> tuple[Tensor, Tensor]:
        """Computes all rows whose tokens and hidden rows are known. Returns what `DraftHead.forward` does,
        for the last `num_logits` rows of each."""
        chunks: list[SequenceChunk] = []
        hidden: list[Tensor] = []
        for sequence, held in jobs:
            start, end = held.num_rows, min(len(sequence.token_ids), held.next_token + 1)
            if end > start:
                chunks.append(self._chunk(held, sequence.token_ids[start:end], start, num_logits))
                hidden += held.take_pending(end - start)
        if not chunks:
            return torch.empty(0), torch.empty(0)
        logits, rows = self._head.forward(chunks, torch.cat(hidden), self._kv)
        for _, held in jobs:
            self._register(held)
        return logits, rows

    def _chunk(
        self, held: _HeldRows, token_ids: Sequence[int], start: int, num_logits: int = 1
    ) -> SequenceChunk:
        before = start - held.first_block * self.blocks.block_size
        return SequenceChunk(token_ids, start, before, held.block_table, num_logits=num_logits)

    def _register(self, held: _HeldRows) -> None:
        """Makes full blocks findable."""
        num_full = min(held.num_rows // self.blocks.block_size, len(held.hashes)) - held.first_block
        for i in range(held.num_registered, num_full):
            self.blocks.register(held.block_table[i], held.hashes[held.first_block + i])
        held.num_registered = max(held.num_registered, num_full)

    def _draw(self, jobs: Sequence[_Job], logits: Tensor, rows: Tensor) -> None:
        """Guesses for every job, one token of each job per round. logits [len(jobs), vocab_size] and rows
        [len(jobs), hidden_size]: of the first round."""
        while True:
            lens = [len(job.sequence.token_ids) + len(job.guessed) for job in jobs]
            tokens = sample(logits, [job.sequence.sampling for job in jobs], lens)
            for job, token in zip(jobs, tokens, strict=True):
                job.guessed.append(token)
            going = [i for i, job in enumerate(jobs) if len(job.guessed) < job.max_tokens]
            if not going:
                return
            if len(going) < len(jobs):
                jobs, rows = [jobs[i] for i in going], rows[to_device(going, rows.device)]
            chunks = [
                self._chunk(job.held, job.guessed[-1:], len(job.sequence.token_ids) + len(job.guessed) - 1)
                for job in jobs
            ]
            logits, rows = self._head.forward(chunks, rows, self._kv)

    def _allowed(self, guessed: Sequence[int]) -> list[int]:
        stop = next((i for i, token in enumerate(guessed) if token in self._forbidden), len(guessed))
        return list(guessed[:stop])
