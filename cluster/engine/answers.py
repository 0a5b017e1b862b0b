"""The answers that an engine generates: which of them a step continues, with which blocks, and what a step's
tokens mean for them. Used on the engine's thread.

Blocks for an answer are allocated as it grows. If every layer of the model has a window, blocks behind the
window are freed. If the pool has no free block, the newest running request is preempted: it loses its blocks,
and its door has the rest of it computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from cluster.clock import Clock
from cluster.engine.lifecycle import EngineState, Lifecycle
from cluster.engine.state import LanguagePhase, LanguageRequest, WorkResult
from cluster.engine.tables import (
    blocks_missing,
    free_blocks_behind_window,
    register_computed,
    share_prompts,
    try_grow,
)
from cluster.scheduling.running import choose_victim, select_batch
from cluster.types.messages import TokenEvent
from cluster.worker.blame import Blame
from cluster.worker.outbox import Outbox

_id_of = attrgetter("request_id")


@dataclass(eq=False)
class Answers:
    _state: EngineState
    _lifecycle: Lifecycle
    _blame: Blame
    _probe: Callable[[], None]  # see `Blame.together`
    _outbox: Outbox
    _clock: Clock
    _window: int | None  # no layer of the model sees more tokens than that, the newest included
    running: deque[LanguageRequest] = field(default_factory=deque, init=False)
    num_waiting: int = field(default=0, init=False)  # of them, which no step can continue now

    def next(self, max_sequences: int) -> list[LanguageRequest]:
        """Those that the next step continues. Not one whose structure takes its time."""
        structured = [request for request in self.running if request.request.structure is not None]
        waiting = {request.request_id for request in structured if not self._may_draw(request)}
        self.num_waiting = len(waiting)
        return select_batch(self.running, max_sequences, waiting)

    def _may_draw(self, request: LanguageRequest) -> bool:
        """False also if the request has failed."""
        with self._blame.of(request.request_id):
            return self._state.runner.may_draw(request)
        return False

    def with_blocks(self, batch: Sequence[LanguageRequest]) -> list[LanguageRequest]:
        """Those that have blocks for this step's tokens and drafts. Newer requests may be preempted for
        them."""
        proposed = self._blame.together(batch, self._propose, _id_of, self._probe)
        batch, size = [request for request, _ in proposed], self._state.blocks.block_size
        needy = [request for request in batch if blocks_missing(request, size)]
        for request in needy:
            with self._blame.of(request.request_id):
                self._make_room(request)
        if not needy:
            return batch
        return [request for request in batch if request.request_id in self._state.requests]

    def begin(self, request: LanguageRequest) -> None:
        """The KV of the prompts is complete, and the door knows the first tokens. A choice that ends with its
        first token needs no blocks."""
        for choice, token_id in zip(request.choices, request.first_tokens, strict=True):
            if not choice.is_done and choice.append(token_id) is not None:
                self._lifecycle.end_choice(request, choice)
        sources, targets = share_prompts(request, self._state.blocks)
        if sources:
            self._state.runner.copy_blocks(sources, targets)
        for choice in request.live_choices:
            for sequence in choice.sequences:
                sequence.extend(choice.token_ids[-1:])
            free_blocks_behind_window(choice, self._state.blocks, self._window)
        self._state.admission.remove(request.request_id)
        self._state.computing.discard(request.request_id)
        request.begin_answer(self._clock.now())
        if not request.live_choices:
            return self._lifecycle.end(request)
        request.move(LanguagePhase.RUNNING)
        self.running.append(request)
        self._state.counts.run(request)

    def advance(self, request: LanguageRequest, result: WorkResult) -> None:
        """A step has drawn these tokens, per live choice. None for a choice that has to be drawn again: see
        `ConstraintMasks`."""
        if not any(result.tokens):
            return
        step_s = request.take_first_step_s(self._clock.now)
        choices = request.live_choices
        for choice, drawn, logprobs in zip(
            choices, result.tokens, result.logprobs or [()] * len(choices), strict=True
        ):
            if not drawn:
                continue
            finish_reason, first_new = None, len(choice.token_ids)
            for token_id in drawn:
                finish_reason = choice.append(token_id)
                if finish_reason is not None:
                    break
            new = tuple(choice.token_ids[first_new:])
            for sequence in choice.sequences:
                sequence.extend(new)
                sequence.verified(len(new))
                register_computed(sequence, self._state.blocks)
            self._state.counts.count_context(choice)
            told = logprobs[: len(new)]
            event = TokenEvent(
                request.request_id, new, finish_reason, choice_idx=choice.idx, step_s=step_s, logprobs=told
            )
            self._outbox.token(request.door, event)
            if finish_reason is None:
                free_blocks_behind_window(choice, self._state.blocks, self._window)
            else:
                self._lifecycle.end_choice(request, choice)
        if not request.live_choices:
            self._lifecycle.close(request, "complete")

    def _propose(self, batch: Sequence[LanguageRequest]) -> Sequence[LanguageRequest]:
        self._state.runner.propose(batch)
        return batch

    def _make_room(self, request: LanguageRequest) -> None:
        while request.request_id in self._state.requests and not try_grow(request, self._state.blocks):
            self._lifecycle.preempt(choose_victim(self.running))
