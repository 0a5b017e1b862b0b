"""The only device code of a language engine: one packed forward over answers and prompts, and the draw of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cluster.engine.draw_state import ConstraintMasks
from cluster.engine.drawing import Choices, Drawer, Drawn
from cluster.engine.features import FeatureStore
from cluster.engine.head_drafts import known_tokens
from cluster.engine.kv_output import Ready
from cluster.engine.sequence import TokenSequence
from cluster.engine.speculation import Speculator, accept
from cluster.engine.state import (
    AnswerChoice,
    FirstTokens,
    LanguageRequest,
    PromptWork,
    Work,
    WorkResult,
)
from cluster.engine.tables import uncut_spans
from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.draw import to_device
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.logprobs import PromptScores
from cluster.model.sampling import sample
from cluster.model.step_model import OnLayer as OnModelLayer
from cluster.model.step_model import StepModel
from cluster.types.logprobs import TokenLogprobs
from cluster.types.request import Prompt, SamplingParams

OnLayer = Callable[[int, Ready], None]
LEAST_SHARE = 0.25  # of a recorded step, below which prompts are not cut to what answers leave of it


class LanguageRunner:
    def __init__(
        self,
        model: LanguageModel,
        steps: StepModel,
        kv: BlockMemory,
        features: FeatureStore,
        speculator: Speculator | None = None,
        masks: ConstraintMasks | None = None,
    ):
        """`steps` computes the model's steps: the model itself, unless it runs on several ranks or is
        recorded. `features`: where embeddings are. `masks`: of constraints; None: no request has one."""
        self._model = model
        self._steps = steps
        self._kv = kv
        self._features = features
        self._speculator = speculator
        self._drawer = Drawer(masks)
        self._in_flight: _InFlight | None = None
        self.num_drafted = 0  # tokens, since the start
        self.num_accepted = 0  # drafts that were right

    def constrain(self, request: LanguageRequest) -> None:
        """See `Drawer.constrain`."""
        self._drawer.constrain(request)

    def may_draw(self, request: LanguageRequest) -> bool:
        """See `Drawer.may_draw`."""
        return self._drawer.may_draw(request)

    def propose(self, requests: Sequence[LanguageRequest]) -> None:
        """Sets the drafts of every live choice: of speculation, or what its constraint forces. Choices with
        guidance get none: their two sequences advance one token at a time."""
        if self._speculator is None and all(request.is_plain for request in requests):
            return
        choices = [choice for r in requests if r.request.guidance is None for choice in r.live_choices]
        room = [choice.stop.max_tokens - choice.num_generated - 1 for choice in choices]
        for choice, drafts, limit in zip(choices, self._guessed(choices, room), room, strict=True):
            constraint = None if choice.draw_state is None else choice.draw_state.constraint
            choice.propose(drafts if constraint is None else constraint.drafts(drafts, limit))

    def _guessed(self, choices: Sequence[AnswerChoice], room: Sequence[int]) -> list[list[int]]:
        if self._speculator is None:
            return [[] for _ in choices]
        try:
            return self._speculator.propose(choices, room)
        except Exception:  # the proposer's state of these choices may be incomplete
            for choice in choices:
                self._speculator.forget(choice.request_id)
            raise

    def room_for_prompts(self, answers: Sequence[LanguageRequest]) -> int | None:
        """Tokens of prompts that a recorded step holds next to these answers and their drafts. None: no step
        with prompts is recorded, or the answers leave too little room for them: they then run in larger
        steps that are not."""
        if not (recorded := self._steps.recorded_tokens):
            return None
        num_drafts = 0 if self._speculator is None else self._speculator.max_draft_tokens
        choices = [choice for request in answers for choice in request.live_choices]
        sequences = [sequence for choice in choices for sequence in choice.sequences]
        room = recorded - sum(each.num_unsettled_tokens + 1 + num_drafts for each in sequences)
        return room if room >= LEAST_SHARE * recorded else None

    @torch.inference_mode()
    def run(
        self, works: Sequence[Work], on_layer: OnLayer, then: Sequence[AnswerChoice] = ()
    ) -> list[WorkResult]:
        """Computes the KV of every answer's last token and drafts, and of the next tokens of prompts; draws
        the next tokens of the answers. `on_layer(i, ready)` is called after layer i if there are prompts. On
        the CPU its KV is written then; on a GPU it is enqueued, and is written once `ready()` is true, and
        only steps with KV to send call: others may be recorded. Blocks; synchronises the device.

        `then`: choices of the answers, if nothing but answers is computed, all of whose drafts are certainly
        right. Their next forward is enqueued before the tokens are read (`cluster.engine.ahead`), but for
        those whose masks are late. It is not waited for."""
        ahead, self._in_flight = self._in_flight, None
        answers = [work for work in works if isinstance(work, LanguageRequest)]
        prompts = [work for work in works if isinstance(work, PromptWork)]
        choices = [(request, choice) for request in answers for choice in request.live_choices]
        self._drawer.begin(choices)
        computed: list[SequenceChunk] = []
        if prompts or any(choice.drafts for _, choice in choices) or self._are_unsettled(choices):
            chunks = [
                self._answer_chunk(choice, sequence) for _, choice in choices for sequence in choice.sequences
            ]
            num_rows = sum(chunk.num_logits for chunk in chunks)
            computed = [self._prompt_chunk(work) for work in prompts]
            chunks += computed
            tells = not self._kv.enqueues or any(work.request.sends for work in prompts)
            logits = self._steps.forward(chunks, self._kv, self._marked(on_layer) if tells else None)
            if prompts:
                self._kv.synchronize()
        else:
            logits = None if ahead is None else ahead.logits_of([choice for _, choice in choices])
            if logits is None:
                logits = self._decode([choice for _, choice in choices])
            num_rows = len(logits)
        enqueue = partial(self._go_ahead, choices, then)
        drawn = self._drawer.next_tokens(logits[:num_rows], choices, enqueue)
        lens = [len(choice.drafts) + 1 for _, choice in choices]
        answered = list(self._accept(drawn, choices))
        self._take_rows(choices, lens, [tokens for tokens, _ in answered], prompts)
        accepted = iter(answered)
        last = iter(logits[num_rows:].clone().split(1) if prompts else ())  # these outlive the step
        scored = iter([() if chunk.scores is None else chunk.scores.found() for chunk in computed])
        return [
            _answer_result([next(accepted) for _ in work.live_choices])
            if isinstance(work, LanguageRequest)
            else WorkResult(logits=next(last) if _is_last(work) else None, prompt_logprobs=next(scored))
            for work in works
        ]

    def _take_rows(
        self, choices: Choices, num_rows: Sequence[int], accepted: Sequence[Sequence[int]],
        prompts: Sequence[PromptWork],
    ) -> None:  # fmt: skip
        """See `known_tokens`."""
        if self._speculator is None or self._speculator.reader is None:
            return
        known = list(known_tokens(choices, num_rows, accepted, prompts))
        try:
            self._speculator.reader.take(known)
        except Exception:  # its state of these choices may be incomplete
            for each in known:
                self._speculator.forget(each.sequence.request_id)
            raise

    def is_in_flight(self, choice: AnswerChoice) -> bool:
        """Whether the forward is enqueued from which the choice's next token is drawn."""
        return self._in_flight is not None and self._in_flight.is_next_of(choice)

    def drop_ahead(self) -> None:
        """Waits for the forward in flight, whose results are not wanted."""
        self._in_flight = None
        self._kv.synchronize()

    @torch.inference_mode()
    def first_tokens(self, requests: Sequence[LanguageRequest]) -> list[FirstTokens]:
        """For each request, all of whose prompts are computed. Synchronises the device."""
        drawn = self._drawer.first_tokens(requests)
        first: list[FirstTokens] = []
        end = 0
        for request in requests:
            start, end = end, end + len(request.request.sampling)
            complete = frozenset(i - start for i in drawn.complete if start <= i < end)
            first.append(FirstTokens(tuple(drawn.tokens[start:end]), drawn.logprobs_of(start, end), complete))
        return first

    @torch.inference_mode()
    def warm_up_prompt(self, num_tokens: int, block_table: Sequence[int]) -> None:
        """One step over a prompt that belongs to no request, and its first token."""
        self._in_flight = None
        _warm_up_draws(self._steps.forward([SequenceChunk([0] * num_tokens, 0, 0, block_table)], self._kv))
        self._kv.synchronize()

    @torch.inference_mode()
    def warm_up_answers(
        self, num_sequences: int, num_context_tokens: int, block_table: Sequence[int]
    ) -> None:
        """One step of `num_sequences` sequences that belong to no request, in blocks that no request holds.
        The sequences may share the blocks: their content does not matter."""
        contexts, tables = [num_context_tokens] * num_sequences, [block_table] * num_sequences
        zeros = [0] * num_sequences
        _warm_up_draws(self._steps.decode(zeros, contexts, zeros, tables, self._kv))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._steps.copy_blocks(sources, targets, self._kv)

    def forget(self, choice: AnswerChoice) -> None:
        """The choice has ended, for whatever reason."""
        if self._speculator is not None:
            self._speculator.forget(choice.request_id)

    def _are_unsettled(self, choices: Choices) -> bool:
        """Whether a state lacks tokens that were drafts: the step computes them, too."""
        if not self._model.state_blocks:
            return False
        return any(sequence.num_unsettled_tokens for _, choice in choices for sequence in choice.sequences)

    def _decode(self, choices: Sequence[AnswerChoice]) -> Tensor:
        """[rows, vocab_size]: one row for each sequence of each choice."""
        rows = [(choice, sequence) for choice in choices for sequence in choice.sequences]
        return self._steps.decode(
            [choice.token_ids[-1] for choice, _ in rows],
            [sequence.num_computed_tokens for _, sequence in rows],
            [sequence.position_delta for _, sequence in rows],
            [sequence.block_table for _, sequence in rows],
            self._kv,
            self._adapters_of(sequence for _, sequence in rows),
            [span for _, sequence in rows for span in sequence.state_spans(1)],
        )

    def _adapters_of(self, sequences: Iterable[TokenSequence]) -> list[int]:
        """Empty if the model has room for none."""
        if not self._model.num_adapter_slots:
            return []
        return [self._adapter_of(sequence.prompt) for sequence in sequences]

    def _adapter_of(self, prompt: Prompt) -> int:
        """Its slot, or 0. A request holds its adapter's slot from its start on."""
        return self._model.adapter_slots[prompt.adapter] if prompt.adapter else 0

    def _go_ahead(
        self, choices: Choices, then: Sequence[AnswerChoice], tokens: Tensor, late: frozenset[int]
    ) -> None:
        """tokens, late: of the choices, as `OnTokens` has them, on the device. The last one of each choice
        goes on."""
        last: dict[AnswerChoice, int] = {}
        end = 0
        for _, choice in choices if then else ():
            first, end = end, end + len(choice.drafts) + 1
            if first not in late:
                last[choice] = end - 1
        then = [choice for choice in then if choice in last]
        rows = [(last[choice], sequence) for choice in then for sequence in choice.sequences]
        if not rows:
            return
        lens = [
            sequence.num_computed_tokens + len(choice.drafts) + 1
            for choice in then
            for sequence in choice.sequences
        ]
        places = [place for place, _ in rows]
        if places != list(range(len(tokens))):
            tokens = tokens[to_device(places, tokens.device)]
        logits = self._steps.decode(
            tokens,
            lens,
            [sequence.position_delta for _, sequence in rows],
            [sequence.block_table for _, sequence in rows],
            self._kv,
            self._adapters_of(sequence for _, sequence in rows),
            [span for _, sequence in rows for span in sequence.span_ahead()],
        )
        self._in_flight = _InFlight.of(then, logits)

    def _marked(self, on_layer: OnLayer) -> OnModelLayer:
        return lambda layer_idx, ready=None, /: on_layer(layer_idx, ready or self._kv.mark())

    def _accept(
        self, drawn: Drawn, choices: Choices
    ) -> Iterator[tuple[list[int], tuple[TokenLogprobs, ...]]]:
        """For each choice, the tokens to append, and their log-probabilities if they are wanted."""
        start = 0
        for _, choice in choices:
            drafts, end = choice.drafts, start + len(choice.drafts) + 1
            tokens = [] if start in drawn.late else drawn.tokens[start:end]
            if drafts:
                tokens = accept(drafts, tokens)
                if tokens and self._speculator is not None:
                    self.num_drafted += len(drafts)
                    self.num_accepted += len(tokens) - 1
                    self._speculator.observe(choice.request_id, len(drafts), len(tokens) - 1)
                choice.drop_drafts()
            yield tokens, drawn.logprobs_of(start, start + len(tokens)) if drawn.logprobs else ()
            start = end

    def _answer_chunk(self, choice: AnswerChoice, sequence: TokenSequence) -> SequenceChunk:
        """Its last token and its drafts, behind the tokens that are computed again."""
        known = choice.token_ids[sequence.num_settled_tokens - sequence.num_computed_tokens - 1 :]
        start, drafts = sequence.num_settled_tokens, choice.drafts
        return SequenceChunk(
            token_ids=[*known, *drafts],
            position_ids=start + sequence.position_delta,
            num_computed_tokens=start,
            block_table=sequence.block_table,
            num_logits=1 + len(drafts),
            adapter=self._adapter_of(sequence.prompt),
            states=sequence.state_spans(len(known), len(drafts)),
        )

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
            scores=_scores(work, start, end),
            adapter=self._adapter_of(prompt),
            states=sequence.state_spans(end - start),
        )

    def _features_of(self, work: PromptWork, start: int, end: int) -> Iterator[FeatureSlice]:
        """The embeddings that tokens [start, end) of the prompt show."""
        for item_idx, item in enumerate(work.sequence.prompt.media):
            for token, row, count in item.pieces(start, end):
                for rows in self._features.rows((work.request_id, item_idx), row, row + count):
                    yield FeatureSlice(token - start, rows)
                    token += len(rows)


@dataclass(frozen=True)
class _InFlight:
    """A forward that is enqueued. logits: valid until the model is called again."""

    rows: Mapping[AnswerChoice, range]
    num_tokens: Mapping[AnswerChoice, int]  # of each choice when it is drawn from
    logits: Tensor

    @classmethod
    def of(cls, choices: Sequence[AnswerChoice], logits: Tensor) -> _InFlight:
        rows, end = {}, 0
        for choice in choices:
            start, end = end, end + len(choice.sequences)
            rows[choice] = range(start, end)
        num_tokens = {choice: len(choice.token_ids) + len(choice.drafts) + 1 for choice in choices}
        return cls(rows, num_tokens, logits)

    def is_next_of(self, choice: AnswerChoice) -> bool:
        return self.num_tokens.get(choice) == len(choice.token_ids)

    def logits_of(self, choices: Sequence[AnswerChoice]) -> Tensor | None:
        """[rows of the choices, vocab_size]. None: they are not the logits that a step of these choices
        wants."""
        if not all(map(self.is_next_of, choices)):
            return None
        rows = [row for choice in choices for row in self.rows[choice]]
        if rows == list(range(len(rows))):
            return self.logits[: len(rows)]
        return self.logits[to_device(rows, self.logits.device)]


def _warm_up_draws(logits: Tensor) -> None:
    """With filters too, so that no request waits for a compiler."""
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_k=20, top_p=0.8)):
        sample(logits, [params] * len(logits), range(len(logits)))


def _is_last(work: PromptWork) -> bool:
    """Whether the prompt is complete after this work."""
    return work.sequence.num_computed_tokens + work.num_tokens == work.sequence.num_prompt_tokens


def _scores(work: PromptWork, start: int, end: int) -> PromptScores | None:
    """Returns room for the scores of the text tokens after tokens [start, end) of the prompt. None: there are
    none, or they are not wanted."""
    request, prompt = work.request, work.sequence.prompt
    num_top = request.request.num_prompt_logprobs
    if num_top is None or not request.scores_prompt or work.sequence is not request.main:
        return None
    told = prompt.text_indices(start + 1, min(end + 1, len(prompt.token_ids)))
    if not told:
        return None
    return PromptScores([i - 1 - start for i in told], [prompt.token_ids[i] for i in told], num_top)


def _answer_result(accepted: Sequence[tuple[list[int], tuple[TokenLogprobs, ...]]]) -> WorkResult:
    return WorkResult([tokens for tokens, _ in accepted], logprobs=[logprobs for _, logprobs in accepted])
