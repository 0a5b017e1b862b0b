"""The only device code of a language engine: one packed forward over answers and prompts, and the draw of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cluster.engine.features import FeatureStore
from cluster.engine.kv_output import Ready
from cluster.engine.speculation import Speculator, accept
from cluster.engine.state import (
    AnswerChoice,
    AnswerWork,
    LanguageRequest,
    PromptWork,
    TokenSequence,
    Work,
    WorkResult,
)
from cluster.engine.tables import uncut_spans
from cluster.kvcache.memory import BlockMemory
from cluster.model.guidance import forbid, guide
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from cluster.model.step_model import StepModel
from cluster.types.request import SamplingParams

OnLayer = Callable[[int, Ready], None]


class LanguageRunner:
    def __init__(
        self,
        model: LanguageModel,
        steps: StepModel,
        kv: BlockMemory,
        features: FeatureStore | None = None,
        speculator: Speculator | None = None,
    ):
        """`steps` computes the model's steps: the model itself, unless it runs on several ranks or is
        recorded. `features`: where embeddings are; None: no prompt with media is computed here."""
        self._model = model
        self._steps = steps
        self._kv = kv
        self._features = features
        self._speculator = speculator
        self.num_drafted = 0  # tokens, since the start
        self.num_accepted = 0  # drafts that were right

    def propose(self, requests: Sequence[LanguageRequest]) -> None:
        """Sets the drafts of every live choice. Choices with guidance get none: their two sequences advance
        one token at a time."""
        if self._speculator is None:
            return
        choices = [choice for r in requests if r.request.guidance is None for choice in r.live_choices]
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
    def run(self, works: Sequence[Work], on_layer: OnLayer) -> list[WorkResult]:
        """Computes the KV of every answer's last token and drafts, and of the next tokens of prompts; draws
        the next tokens of the answers. `on_layer(i, ready)` is called after layer i if there are prompts. On
        the CPU its KV is written then; on a GPU it is enqueued, and is written once `ready()` is true.
        Blocks; synchronises the device."""
        answers = [work.request for work in works if isinstance(work, AnswerWork)]
        prompts = [work for work in works if isinstance(work, PromptWork)]
        choices = [(request, choice) for request in answers for choice in request.live_choices]
        if prompts or any(choice.drafts for _, choice in choices):
            chunks = [
                _answer_chunk(choice, sequence) for _, choice in choices for sequence in choice.sequences
            ]
            num_rows = sum(len(chunk.token_ids) for chunk in chunks)
            chunks += map(self._prompt_chunk, prompts)
            logits = self._steps.forward(chunks, self._kv, lambda i: on_layer(i, self._kv.mark()))
            self._kv.synchronize()
        else:
            logits = self._decode([choice for _, choice in choices])
            num_rows = len(logits)
        drawn = iter(self._draw(_guided(logits[:num_rows], choices), [choice for _, choice in choices]))
        last = iter(logits[num_rows:].split(1))
        return [
            WorkResult(tokens=[self._accept(choice, drawn) for choice in work.request.live_choices])
            if isinstance(work, AnswerWork)
            else WorkResult(logits=next(last) if _is_last(work) else None)
            for work in works
        ]

    @torch.inference_mode()
    def first_tokens(self, requests: Sequence[LanguageRequest]) -> list[tuple[int, ...]]:
        """For each request, all of whose prompts are computed: one token for each choice. Synchronises the
        device."""
        rows, params, positions = [], [], []
        for request in requests:
            logits = _final_logits(request)
            for sampling in request.request.sampling:
                rows.append(logits)
                params.append(sampling)
                positions.append(request.main.num_prompt_tokens)
        drawn = iter(sample(torch.cat(rows), params, positions))
        return [tuple(next(drawn) for _ in request.request.sampling) for request in requests]

    @torch.inference_mode()
    def warm_up_prompt(self, num_tokens: int, block_table: Sequence[int]) -> None:
        """One step over a prompt that belongs to no request."""
        self._steps.forward([SequenceChunk([0] * num_tokens, 0, 0, block_table)], self._kv)
        self._kv.synchronize()

    @torch.inference_mode()
    def warm_up_answers(
        self, num_sequences: int, num_context_tokens: int, block_table: Sequence[int]
    ) -> None:
        """One step of `num_sequences` sequences that belong to no request, in blocks that no request holds.
        The sequences may share the blocks: their content does not matter."""
        contexts, tables = [num_context_tokens] * num_sequences, [block_table] * num_sequences
        zeros = [0] * num_sequences
        logits = self._steps.decode(zeros, contexts, zeros, tables, self._kv)
        sample(logits, [SamplingParams()] * num_sequences, contexts)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._steps.copy_blocks(sources, targets, self._kv)

    def forget(self, choice: AnswerChoice) -> None:
        """The choice has ended, for whatever reason."""
        if self._speculator is not None:
            self._speculator.forget(choice.request_id)

    def _decode(self, choices: Sequence[AnswerChoice]) -> Tensor:
        """[rows, vocab_size]: one row for each sequence of each choice."""
        rows = [(choice, sequence) for choice in choices for sequence in choice.sequences]
        return self._steps.decode(
            [choice.token_ids[-1] for choice, _ in rows],
            [sequence.num_computed_tokens for _, sequence in rows],
            [sequence.position_delta for _, sequence in rows],
            [sequence.block_table for _, sequence in rows],
            self._kv,
        )

    def _accept(self, choice: AnswerChoice, drawn: Iterator[int]) -> list[int]:
        tokens = accept(choice.drafts, [next(drawn) for _ in range(len(choice.drafts) + 1)])
        if choice.drafts and self._speculator is not None:
            self.num_drafted += len(choice.drafts)
            self.num_accepted += len(tokens) - 1
            self._speculator.observe(choice.request_id, len(choice.drafts), len(tokens) - 1)
        choice.drafts = []
        return tokens

    def _draw(self, logits: Tensor, choices: Sequence[AnswerChoice]) -> list[int]:
        """logits: [one row per choice and draft + 1, vocab_size], as the model gave them."""
        if not choices:
            return []
        allowed = forbid(logits, [ids for choice in choices for ids in _forbidden(choice)])
        params = [choice.sampling for choice in choices for _ in range(len(choice.drafts) + 1)]
        return sample(allowed, params, [position for choice in choices for position in _positions(choice)])

    def _prompt_chunk(self, work: PromptWork) -> SequenceChunk:
        sequence, prompt = work.sequence, work.sequence.prompt
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + work.num_tokens
        positions = sequence.positions
        return SequenceChunk(
            token_ids=prompt.token_ids[start:end],
            position_ids=start + sequence.position_delta
            if positions is None
            else positions.position_ids[..., start:end],
            num_computed_tokens=start,
            block_table=sequence.block_table,
            features=tuple(self._features_of(work, start, end)),
            num_logits=int(_is_last(work)),
            bidirectional_spans=uncut_spans(self._model, prompt),
        )

    def _features_of(self, work: PromptWork, start: int, end: int) -> Iterator[FeatureSlice]:
        """The embeddings that tokens [start, end) of the prompt show."""
        for item_idx, item in enumerate(work.sequence.prompt.media):
            for token, row, count in item.pieces(start, end):
                assert self._features is not None
                for rows in self._features.rows((work.request.request_id, item_idx), row, row + count):
                    yield FeatureSlice(token - start, rows)
                    token += len(rows)


def _is_last(work: PromptWork) -> bool:
    """Whether the prompt is complete after this work."""
    return work.sequence.num_computed_tokens + work.num_tokens == work.sequence.num_prompt_tokens


def _answer_chunk(choice: AnswerChoice, sequence: TokenSequence) -> SequenceChunk:
    token_ids = [choice.token_ids[-1], *choice.drafts]
    return SequenceChunk(
        token_ids=token_ids,
        position_ids=sequence.num_computed_tokens + sequence.position_delta,
        num_computed_tokens=sequence.num_computed_tokens,
        block_table=sequence.block_table,
        num_logits=len(token_ids),
    )


def _final_logits(request: LanguageRequest) -> Tensor:
    """[1, vocab_size], ready to draw from."""
    last = [sequence.last_logits for sequence in request.sequences]
    logits, *negative = [logits for logits in last if logits is not None]
    guidance, stop = request.request.guidance, request.request.stop
    if guidance is not None:
        logits = guide(logits, negative[0], guidance.scale)
    return forbid(logits, [stop.stop_token_ids if stop.min_tokens > 0 else ()])


def _guided(logits: Tensor, choices: Sequence[tuple[LanguageRequest, AnswerChoice]]) -> Tensor:
    """The two rows of each guided choice become one."""
    if not any(request.request.guidance for request, _ in choices):
        return logits
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


def _positions(choice: AnswerChoice) -> range:
    """The index that each token drawn in this step will have."""
    first = len(choice.token_ids)
    return range(first, first + len(choice.drafts) + 1)


def _forbidden(choice: AnswerChoice) -> Iterator[Sequence[int]]:
    for num_generated in range(choice.num_generated, choice.num_generated + len(choice.drafts) + 1):
        yield choice.stop.stop_token_ids if num_generated < choice.stop.min_tokens else ()
