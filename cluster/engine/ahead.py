"""The forward after the one whose tokens are drawn: on a GPU it is enqueued before the host has read them.

    enqueue the draw of step k, and the forward of step k + 1     its tokens are read on the device
    read the tokens of k; requests advance, doors are told        while the device computes k + 1
    draw k + 1 from that forward's logits …

The *draw* waits until the host knows everything about step k, so stops, penalties, biases, guidance, masks of
grammars, `n` and log-probabilities need nothing special: what they change is changed before it, and what they
read is enqueued with it. An answer that has ended meanwhile has been computed once in vain, and its row is
not drawn from. What is new joins one step later. It is made for steps of answers alone that are all that can
run, without speculation: which guesses are right, and so what follows them, is known too late.

Text that a grammar forces is certainly right, so behind a step that computes it the next forward can be
enqueued, too. But it shows when the token before it is read, too late for the forward in flight, which gives
the first of its tokens alone: such a step takes one token of each answer. So a forward ahead is worth a part
of a token of each answer (what the host does while the device computes), and costs a step of each answer that
has more forced tokens, or turns out to have some. No forward is enqueued where the forced tokens that are
left, and answers that had some in their last steps, are together as many as the answers of the step. So
dense forced text is computed at once, as without this; in long strings, and among many plain answers, steps
go ahead.

A forward ahead may always be dropped: the next step computes the same tokens again, and writes the same KV
and states into the same places. So whatever is unusual costs a forward at most. But where models keep states,
of two places each, it writes over the state that the step before it began with: if that step fails after all,
its answers go on in another attempt (`TokenSequence.span_ahead`). What the step is to compute again, as its
mask is late, is left out. The state lacks forced tokens that were computed as drafts, so nothing is enqueued
behind these.

Until it has finished, the forward writes one row of KV for each of its sequences, and a state. The blocks of
both are held meanwhile: a block that an answer gives back could otherwise be leased to another worker, whose
write the device does not wait for. What is in flight, the runner knows. Used on the engine's thread.

An H100 ran it under load, without a look at the tokens (bench/gpu/README.md); with structures and with states
no GPU has run it. Tokens are compared on a CPU with the device's part computed at once
(tests/flow/test_ahead.py), on a simulated GPU, and in the histories with that part late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.clock import Clock
from cluster.engine.lifecycle import EngineState
from cluster.engine.state import AnswerChoice, LanguageRequest
from cluster.worker.blame import Blame, bookkeeping

FREE_STEPS = 3  # without forced tokens, after which a structured answer counts as free text


def may_run_ahead(device: torch.device) -> bool:
    """Where the host computes, a forward that is enqueued would only begin later."""
    return device.type == "cuda"


class ForwardAhead:
    def __init__(self, state: EngineState, blame: Blame, clock: Clock, *, is_on: bool):
        """`is_on`: False: no forward is enqueued ahead, as where the host computes it."""
        self._state = state
        self._blame = blame
        self._clock = clock
        self._is_on = is_on
        self._began_at: float | None = None
        self._ended_at = 0.0
        # Blocks that the forward in flight writes to, and the one that the step is to enqueue
        self._held: list[int] = []
        self._held_next: list[int] = []

    @property
    def step_s(self) -> float | None:
        """How long the step has taken that `finish` ended, if it had begun ahead: since the step before."""
        return None if self._began_at is None else self._ended_at - self._began_at

    def computes(self, batch: Sequence[LanguageRequest]) -> list[LanguageRequest]:
        """Those of the batch whose next forward is in flight. They are the next step, if there are any: what
        has come meanwhile, answers and prompts, joins the step after it."""
        if not self._held:
            return []
        is_in_flight = self._state.runner.is_in_flight
        return [request for request in batch if all(map(is_in_flight, request.live_choices))]

    def plan(self, batch: Sequence[LanguageRequest], *, is_alone: bool) -> list[AnswerChoice]:
        """A step begins; drafts are set. Returns the choices of its answers whose next forward it is to
        enqueue; none if that must wait for the tokens, or for a request that is not in the step. They have
        blocks for what both compute then. `is_alone`: nothing else could run in the next step. A request that
        raises has failed."""
        if not self._is_on:
            return []
        choices = [choice for request in batch for choice in request.live_choices]
        is_begun = bool(self._held and choices) and all(map(self._state.runner.is_in_flight, choices))
        self._began_at = self._ended_at if is_begun else None
        num_forced = _take_first(choices) if is_begun else 0
        num_forced += sum(map(_num_doubtful, batch))
        if not is_alone or num_forced >= len(choices):
            return []
        going: list[AnswerChoice] = []
        for request in batch:
            with self._blame.of(request.request_id):
                for choice in request.live_choices:
                    num_new = len(choice.drafts) + 1
                    if choice.num_generated + num_new < choice.stop.max_tokens:  # else it ends with these
                        if _is_unsettled_by(choice) or not self._try_cover(choice, num_new + 1):
                            return []
                        going.append(choice)
        self._hold(going)
        return going

    def _try_cover(self, choice: AnswerChoice, num_new: int) -> bool:
        """Blocks for the next tokens. False: there is no room."""
        blocks = self._state.blocks
        for sequence in choice.sequences:
            if count := sequence.num_blocks_missing(num_new, blocks.block_size):
                if (fresh := blocks.try_allocate(count)) is None:
                    return False
                sequence.hold(fresh)
        return True

    def _hold(self, choices: Sequence[AnswerChoice]) -> None:
        """Keeps what their next forward writes to: the row behind the step's tokens, and the state that the
        step begins with."""
        written: list[int] = []
        for choice in choices:
            for sequence in choice.sequences:
                position = sequence.num_computed_tokens + len(choice.drafts) + 1
                written.append(sequence.block_table[position // self._state.blocks.block_size])
                written += sequence.state
        self._state.blocks.share(written)
        self._held_next = written

    @bookkeeping
    def finish(self) -> None:
        """The step has ended, and with it every forward that was enqueued before its draw."""
        self._ended_at = self._clock.now()
        self._state.blocks.free(self._held)
        self._held, self._held_next = self._held_next, []

    def drop(self) -> None:
        """No step follows. Waits for the forward in flight."""
        if self._held:
            self._state.runner.drop_ahead()
            self.finish()


def _take_first(choices: Sequence[AnswerChoice]) -> int:
    """A step has one row of logits for each choice: forced tokens are computed in the next ones. Returns how
    many are left behind the first of each choice."""
    num_left = sum(max(0, len(choice.drafts) - 1) for choice in choices)
    for choice in choices:
        choice.drop_drafts()
    return num_left


def _num_doubtful(request: LanguageRequest) -> int:
    """Choices whose next tokens may turn out to be forced, as some were in their last steps."""
    if request.request.structure is None or request.request.guidance is not None:
        return 0
    return sum(choice.num_steps_without < FREE_STEPS for choice in request.live_choices)


def _is_unsettled_by(choice: AnswerChoice) -> bool:
    """Whether a state will lack the step's drafts."""
    return bool(choice.drafts) and any(sequence.state for sequence in choice.sequences)
