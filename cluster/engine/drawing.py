"""Every draw of a language engine: the first tokens behind a prompt, and the next tokens in each step.

A request that asks for nothing special is drawn from the logits as they are. For others, in this order, which
is transformers':

    log-probabilities        are read, as the model gave them
    guidance                 the rows of a choice and of its negative sequence become one
    bias
    penalties                repetition, then frequency and presence
    tokens that cannot come  the ends of bad words, and stop tokens before `min_tokens`
    allowed tokens           of the request, then of the choice's constraint
    temperature, filters     `cluster.model.sampling`, which draws

A row is changed by what stands before it alone: the prompt, what was generated, and the drafts before the
row. So a drawn token is a function of the request and its position: on every worker, after a preemption and
with any drafts. What this needs of a choice is in its `DrawState`. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.engine.draw_state import ConstraintMasks, DrawState
from cluster.engine.state import AnswerChoice, LanguageRequest
from cluster.errors import InternalError
from cluster.model.changes import Changes, guide_rows
from cluster.model.cuda.draw import to_device
from cluster.model.logprobs import RawLogprobs, Reading
from cluster.model.sampling import sample
from cluster.types.logprobs import TokenLogprobs
from cluster.types.request import SamplingParams

Choices = Sequence[tuple[LanguageRequest, AnswerChoice]]
# Tokens are drawn, [rows] int64, or enqueued: all but those in these rows and behind them, of choices whose
# masks are late
OnTokens = Callable[[Tensor, frozenset[int]], None]


@dataclass(frozen=True)
class Drawn:
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index of the token, where wanted
    complete: frozenset[int] = frozenset()  # indices of first tokens with which a choice is complete
    late: frozenset[int] = frozenset()  # indices at which a choice begins whose tokens mean nothing

    def logprobs_of(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Returns those of tokens [start, end), of one request; empty if it does not want them."""
        return tuple(self.logprobs[i] for i in range(start, end)) if start in self.logprobs else ()


@dataclass(frozen=True)
class _Rows:
    """Successive rows of one choice that is not plain: behind its last token, and behind each draft."""

    first: int  # among the rows that are drawn from
    raw: int  # among the model's, where the row of a negative sequence follows
    state: DrawState
    num_generated: int = 0  # tokens of this attempt before the first row
    drafts: Sequence[int] = ()

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.drafts) + 1)

    def forbidden(self) -> Iterator[tuple[int, list[int]]]:
        for num_drafts, row in enumerate(self.rows):
            yield row, self.state.forbidden(self.num_generated, self.drafts[:num_drafts])


class Drawer:
    def __init__(self, masks: ConstraintMasks | None = None):
        """`masks`: None: no request has a constraint."""
        self._masks = masks

    def begin(self, choices: Choices) -> None:
        """A step for these choices begins; their drafts are set."""
        if self._masks is None:
            return
        changed = [(request, choice) for request, choice in choices if not request.is_plain]
        _start(self._masks, [(self._state_of(*each), each[1].drafts) for each in changed])

    def next_tokens(
        self, logits: Tensor, choices: Choices, on_drawn: OnTokens = lambda tokens, late: None
    ) -> Drawn:
        """A token behind the last one of each choice, and behind each of its drafts. logits: [rows, V]
        float32 as the model gave them, one row for each of these tokens, and behind it that of the negative
        sequence if there is one. May change them. `on_drawn`: see `sample`. Synchronises the device."""
        if not choices:
            return Drawn([])
        if any(choice.drafts for _, choice in choices):
            params = [choice.sampling for _, choice in choices for _ in range(len(choice.drafts) + 1)]
            positions = [position for _, choice in choices for position in _positions(choice)]
        else:
            params = [choice.sampling for _, choice in choices]
            positions = [len(choice.token_ids) for _, choice in choices]
        if all(request.is_plain for request, _ in choices):
            return Drawn(sample(logits, params, positions, lambda tokens: on_drawn(tokens, frozenset())))
        changed, first, raw = [], 0, 0
        for request, choice in choices:
            if not request.is_plain:
                state = self._state_of(request, choice)
                changed.append(_Rows(first, raw, state, choice.num_generated, choice.drafts))
            first += len(choice.drafts) + 1
            raw += (len(choice.drafts) + 1) * len(request.request.prompts)
        raw_logprobs = _raw_logprobs(logits, changed, range(first))
        logits, late = self._changed(logits, changed)
        tokens, logprobs = _sample(
            raw_logprobs, logits, params, positions, lambda tokens: on_drawn(tokens, late)
        )
        return Drawn(tokens, logprobs, late=late)

    def first_tokens(self, requests: Sequence[LanguageRequest]) -> Drawn:
        """A token behind the prompt for each choice of each request, all of whose prompts are computed.
        Synchronises the device."""
        changed, raw = [], 0
        for first, request in enumerate(requests):
            if not request.is_plain:
                changed.append(_Rows(first, raw, self._first_state(request)))
            raw += len(request.sequences)
        if self._masks is not None:
            _start(self._masks, [(each.state, ()) for each in changed])
        # A copy: it is changed, and a draw that fails is repeated
        sequences = [sequence for request in requests for sequence in request.sequences]
        logits = torch.cat([each.last_logits for each in sequences if each.last_logits is not None])
        row_of = [row for row, request in enumerate(requests) for _ in request.request.sampling]
        raw_logprobs = _raw_logprobs(logits, changed, row_of)
        logits, late = self._changed(logits, changed)
        if late:  # the mask at the beginning of an answer is made with its grammar
            raise InternalError("a request has no mask for its first token")
        params = [sampling for request in requests for sampling in request.request.sampling]
        positions = [requests[row].main.num_prompt_tokens for row in row_of]
        if len(row_of) > len(requests):
            logits = logits[to_device(row_of, logits.device)]
        tokens, logprobs = _sample(raw_logprobs, logits, params, positions)
        states = {each.first: each.state for each in changed}
        complete = frozenset(
            i
            for i, row in enumerate(row_of)
            if (state := states.get(row)) is not None and state.completes(tokens[i])
        )
        return Drawn(tokens, logprobs, complete)

    def may_draw(self, request: LanguageRequest) -> bool:
        """Whether a step can draw for all its choices. Raises what ends the request."""
        if self._masks is None:
            return True
        states = [choice.draw_state for choice in request.live_choices]
        constraints = [state.constraint for state in states if state is not None]
        may_draw = [self._masks.may_draw(each) for each in constraints if each is not None]
        return all(may_draw)

    def constrain(self, request: LanguageRequest) -> None:
        """The request has a structure, which is known to the masks; no choice has a token yet."""
        for choice in request.choices:
            self._state_of(request, choice)

    def _state_of(self, request: LanguageRequest, choice: AnswerChoice) -> DrawState:
        if choice.draw_state is None:
            generated = choice.token_ids[request.request.prompt.num_asked :]
            state = DrawState(request.request, generated, self._masks)
            choice.draw_with(state)
            return state
        return choice.draw_state

    def _first_state(self, request: LanguageRequest) -> DrawState:
        """Returns the state of every choice before its first token."""
        prompt = request.request.prompt
        return DrawState(request.request, prompt.token_ids[prompt.num_asked :], self._masks)

    def _changed(self, logits: Tensor, changed: Sequence[_Rows]) -> tuple[Tensor, frozenset[int]]:
        """[rows that are drawn from, V], and the first rows of choices whose masks are late. May change
        `logits`."""
        logits = _guided(logits, changed)
        rows = [(row, each.state) for each in changed for row in each.rows]
        counts = [
            (row, *counts, each.state.changes)
            for each in changed
            if each.state.counts is not None
            for row, counts in zip(each.rows, each.state.counts.rows(each.drafts), strict=True)
        ]
        masked = [each for each in changed if each.state.constraint is not None]
        masks, late = None, frozenset[int]()
        if masked and self._masks is not None:
            masks, late = self._masks.take()
        known = [(row, i not in late) for i, each in enumerate(masked) for row in each.rows]
        if masks is not None and late:
            masks = masks[[is_known for _, is_known in known]]
        Changes(
            bias=[(row, *state.bias) for row, state in rows if state.changes.bias],
            counted=counts,
            forbidden=[forbidden for each in changed for forbidden in each.forbidden()],
            allowed=[(row, state.allowed) for row, state in rows if len(state.allowed)],
            masked=[row for row, is_known in known if is_known] if masks is not None else (),
            masks=masks,
        ).apply(logits)
        return logits, frozenset(masked[i].first for i in late)


def _start(masks: ConstraintMasks, states: Sequence[tuple[DrawState, Sequence[int]]]) -> None:
    wanted = [(state.constraint, drafts) for state, drafts in states if state.constraint is not None]
    if wanted:
        masks.start(wanted)


def _positions(choice: AnswerChoice) -> range:
    """The index that each token drawn in this step will have."""
    first = len(choice.token_ids)
    return range(first, first + len(choice.drafts) + 1)


def _guided(logits: Tensor, changed: Sequence[_Rows]) -> Tensor:
    """The two rows of each guided choice, which has no drafts, become one."""
    guided = [
        (each.first, each.raw, guidance.scale)
        for each in changed
        if (guidance := each.state.request.guidance) is not None
    ]
    return guide_rows(logits, guided) if guided else logits


def _raw_logprobs(logits: Tensor, changed: Sequence[_Rows], rows: Sequence[int]) -> RawLogprobs:
    """rows: of each token that is drawn."""
    wanted: dict[int, tuple[int, int]] = {}
    for each in changed:
        if (num_top := each.state.request.num_logprobs) is not None:
            wanted |= {row: (each.raw + i, num_top) for i, row in enumerate(each.rows)}
    return RawLogprobs(logits, wanted, rows)


def _sample(
    raw: RawLogprobs,
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    on_drawn: Callable[[Tensor], None] = lambda tokens: None,
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """`sample`, and the log-probabilities of what it draws, enqueued before `on_drawn` is called."""
    readings: list[Reading] = []

    def on_tokens(tokens: Tensor) -> None:
        readings.append(raw.reading(tokens))
        on_drawn(tokens)

    tokens = sample(logits, params, positions, on_tokens)
    return tokens, readings[0]()
