"""The forward after the one whose tokens are drawn: on a GPU it is enqueued before the host has read them.

    enqueue the draw of step k, and the forward of step k + 1     its tokens are read on the device
    read the tokens of k; requests advance, doors are told        while the device computes k + 1
    draw k + 1 from that forward's logits …

The *draw* waits until the host knows everything about step k, so stops, penalties, biases, guidance, `n` and
log-probabilities need nothing special: what they change is changed before it, and what they read is enqueued
with it. An answer that has ended meanwhile has been computed once in vain, and its row is not drawn from.
What is new joins one step later.

A forward ahead may always be dropped: the next step computes the same tokens again, and writes the same KV
into the same places. So it is made only for the common case, steps of answers alone that are all that runs,
without grammars, and whatever is unusual costs a forward at most.

Until it has finished, the forward writes one row of KV for each of its sequences. The blocks of these rows
are held meanwhile: a block that an answer gives back could otherwise be leased to another worker, whose write
the device does not wait for. Used on the engine's thread.

An H100 ran it under load, without a look at the tokens (bench/gpu/README.md). Tokens are compared on a CPU
with the device's part computed at once (tests/flow/test_ahead.py), on a simulated GPU, and in the histories
with that part late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.clock import Clock
from cluster.engine.lifecycle import EngineState
from cluster.engine.state import AnswerChoice, LanguageRequest
from cluster.worker.blame import Blame, bookkeeping


def may_run_ahead(device: torch.device) -> bool:
    """Where the host computes, a forward that is enqueued would only begin later."""
    return device.type == "cuda"


def _must_wait(request: LanguageRequest) -> bool:
    """A grammar may say several of the next tokens, which one forward computes; which ones follows from the
    token that is drawn."""
    return request.request.structure is not None


class ForwardAhead:
    def __init__(self, state: EngineState, blame: Blame, clock: Clock, *, is_on: bool):
        """`is_on`: False: no forward is enqueued ahead, as where the host computes it."""
        self._state = state
        self._blame = blame
        self._clock = clock
        self._is_on = is_on
        self._began_at: float | None = None
        self._ended_at = 0.0
        # Of the forward in flight: what it computes, and the blocks that it writes to
        self._in_flight: frozenset[AnswerChoice] = frozenset()
        self._held: list[int] = []
        # Of the one that the step is to enqueue
        self._next: tuple[frozenset[AnswerChoice], list[int]] = (frozenset(), [])

    @property
    def step_s(self) -> float | None:
        """How long the step has taken that `finish` ended, if it had begun ahead: since the step before."""
        return None if self._began_at is None else self._ended_at - self._began_at

    def computes(self, batch: Sequence[LanguageRequest]) -> list[LanguageRequest]:
        """Those of the batch whose next forward is in flight. They are the next step, if there are any: what
        has come meanwhile, answers and prompts, joins the step after it."""
        if not self._in_flight:
            return []
        return [request for request in batch if self._in_flight.issuperset(request.live_choices)]

    def plan(self, batch: Sequence[LanguageRequest], *, is_alone: bool) -> list[AnswerChoice]:
        """A step begins. Returns the choices of its answers whose next forward it is to enqueue; none if that
        must wait for the tokens, or for a request that is not in the step. They have blocks for both tokens
        then. `is_alone`: nothing else could run in the next step. A request that raises has failed."""
        self._began_at = self._ended_at if self._in_flight else None
        if not (self._is_on and is_alone) or any(map(_must_wait, batch)):
            return []
        choices: list[AnswerChoice] = []
        for request in batch:
            with self._blame.of(request.request_id):
                for choice in request.live_choices:
                    if choice.num_generated + 1 < choice.stop.max_tokens:  # else this token is its last
                        if not self._try_cover(choice):
                            return []
                        choices.append(choice)
        size = self._state.blocks.block_size
        written = [
            sequence.block_table[(sequence.num_computed_tokens + 1) // size]
            for choice in choices
            for sequence in choice.sequences
        ]
        self._state.blocks.share(written)
        self._next = (frozenset(choices), written)
        return choices

    def _try_cover(self, choice: AnswerChoice) -> bool:
        """Blocks for the next two tokens. False: there is no room."""
        blocks = self._state.blocks
        for sequence in choice.sequences:
            if count := sequence.num_blocks_missing(2, blocks.block_size):
                if (fresh := blocks.try_allocate(count)) is None:
                    return False
                sequence.hold(fresh)
        return True

    @bookkeeping
    def finish(self) -> None:
        """The step has ended, and with it every forward that was enqueued before its draw."""
        self._ended_at = self._clock.now()
        self._state.blocks.free(self._held)
        (self._in_flight, self._held), self._next = self._next, (frozenset(), [])

    def drop(self) -> None:
        """No step follows. Waits for the forward in flight."""
        if self._in_flight:
            self._state.runner.drop_ahead()
            self.finish()
