"""The only device code of a decode worker: one step of a batch, with or without drafts to verify."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.guidance import forbid, guide
from cluster.model.language import SequenceChunk
from cluster.model.sampling import sample
from cluster.model.step_model import StepModel
from cluster.types.request import SamplingParams
from decode_service.speculation import Speculator, accept
from decode_service.state import Branch, DecodeChoice, DecodeRequest, PromptPart


class DecodeRunner:
    def __init__(self, model: StepModel, kv: BlockMemory, speculator: Speculator | None = None):
        self._model = model
        self._kv = kv
        self._speculator = speculator
        self.num_drafted = 0  # tokens, since the start
        self.num_accepted = 0  # drafts that were right

    def propose(self, batch: Sequence[DecodeRequest]) -> None:
        """Sets the drafts of every choice of the batch. Choices with guidance get none: their two sequences
        advance one token at a time."""
        if self._speculator is None:
            return
        choices = [choice for r in batch if r.request.guidance is None for choice in r.live_choices]
        room = [choice.stop.max_tokens - choice.num_generated - 1 for choice in choices]
        try:
            proposed = self._speculator.propose(choices, room)
        except Exception:  # the proposer's state of these choices may be incomplete
            for choice in choices:
                self._speculator.forget(choice.request_id)
            raise
        for choice, drafts in zip(choices, proposed, strict=True):
            choice.drafts = drafts

    @torch.inference_mode()
    def run(self, batch: Sequence[DecodeRequest]) -> list[list[list[int]]]:
        """Computes the KV of every choice's last token and of its drafts, and draws the next tokens. Returns,
        per request and live choice, the new tokens: at least one. Blocks; synchronises the device."""
        choices = [(request, choice) for request in batch for choice in request.live_choices]
        drawn = iter(self._draw(self._logits(choices), [choice for _, choice in choices]))
        return [[self._accept(choice, drawn) for choice in request.live_choices] for request in batch]

    @torch.inference_mode()
    def compute(self, parts: Sequence[PromptPart]) -> list[tuple[int, ...]]:
        """Computes the KV of parts of several prompts. Returns, per part, a first token for each choice that
        it draws for. Blocks; synchronises the device."""
        logits = self._model.forward([_prompt_chunk(part) for part in parts], self._kv)
        self._kv.synchronize()
        last = [part for part in parts if part.draws]
        if not last:
            return [() for _ in parts]
        choices = [choice for part in last for choice in part.draws]
        rows = [row for row, part in enumerate(last) for _ in part.draws]
        drawn = iter(self._draw(logits[rows], choices))
        return [tuple(next(drawn) for _ in part.draws) for part in parts]

    @torch.inference_mode()
    def warm_up(self, num_sequences: int, num_context_tokens: int, block_table: Sequence[int]) -> None:
        """One step of `num_sequences` sequences that belong to no request, in blocks that no request holds.
        The sequences may share the blocks: their content does not matter."""
        contexts, tables = [num_context_tokens] * num_sequences, [block_table] * num_sequences
        zeros = [0] * num_sequences
        logits = self._model.decode(zeros, contexts, zeros, tables, self._kv)
        sample(logits, [SamplingParams()] * num_sequences, contexts)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._model.copy_blocks(sources, targets, self._kv)

    def forget(self, choice: DecodeChoice) -> None:
        """The choice has ended, for whatever reason."""
        if self._speculator is not None:
            self._speculator.forget(choice.request_id)

    def _accept(self, choice: DecodeChoice, drawn: Iterator[int]) -> list[int]:
        tokens = accept(choice.drafts, [next(drawn) for _ in range(len(choice.drafts) + 1)])
        if choice.drafts and self._speculator is not None:
            self.num_drafted += len(choice.drafts)
            self.num_accepted += len(tokens) - 1
            self._speculator.observe(choice.request_id, len(choice.drafts), len(tokens) - 1)
        choice.drafts = []
        return tokens

    def _draw(self, logits: Tensor, choices: Sequence[DecodeChoice]) -> list[int]:
        """logits: [one row per choice and draft + 1, vocab_size], as the model gave them."""
        allowed = forbid(logits, [ids for choice in choices for ids in _forbidden(choice)])
        params = [choice.sampling for choice in choices for _ in range(len(choice.drafts) + 1)]
        return sample(allowed, params, [position for choice in choices for position in _positions(choice)])

    def _logits(self, choices: Sequence[tuple[DecodeRequest, DecodeChoice]]) -> Tensor:
        """[one row per choice and draft + 1, vocab_size], guided."""
        rows = [(choice, branch) for _, choice in choices for branch in choice.branches]
        if any(choice.drafts for _, choice in choices):
            logits = self._model.forward([_chunk(choice, branch) for choice, branch in rows], self._kv)
        else:
            logits = self._model.decode(
                [choice.token_ids[-1] for choice, _ in rows],
                [choice.context_len(branch) for choice, branch in rows],
                [branch.position_delta for _, branch in rows],
                [branch.block_table for _, branch in rows],
                self._kv,
            )
        if any(request.request.guidance for request, _ in choices):
            logits = _guided(logits, choices)
        return logits


def _guided(logits: Tensor, choices: Sequence[tuple[DecodeRequest, DecodeChoice]]) -> Tensor:
    """The two rows of each guided choice become one."""
    out, row = [], 0
    for request, choice in choices:
        guidance, num_rows = request.request.guidance, len(choice.drafts) + 1
        if guidance is None:
            out.append(logits[row : row + num_rows])
            row += num_rows
        else:
            out.append(guide(logits[row : row + 1], logits[row + 1 : row + 2], guidance.scale))
            row += 2
    return torch.cat(out)


def _positions(choice: DecodeChoice) -> range:
    """The index that each token drawn in this step will have."""
    first = len(choice.token_ids)
    return range(first, first + len(choice.drafts) + 1)


def _forbidden(choice: DecodeChoice) -> Iterator[Sequence[int]]:
    for num_generated in range(choice.num_generated, choice.num_generated + len(choice.drafts) + 1):
        yield choice.stop.stop_token_ids if num_generated < choice.stop.min_tokens else ()


def _prompt_chunk(part: PromptPart) -> SequenceChunk:
    first = part.start + part.position_delta
    return SequenceChunk(
        part.token_ids, first, part.start, part.block_table, num_logits=int(bool(part.draws))
    )


def _chunk(choice: DecodeChoice, branch: Branch) -> SequenceChunk:
    context_len = choice.context_len(branch)
    token_ids = [choice.token_ids[-1], *choice.drafts]
    return SequenceChunk(
        token_ids=token_ids,
        position_ids=context_len + branch.position_delta,
        num_computed_tokens=context_len,
        block_table=branch.block_table,
        num_logits=len(token_ids),
    )
