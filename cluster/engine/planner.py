"""The prompts that an engine computes, and which of their tokens run in its next step. The size of a step is
learnt from the steps before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguageRequest, PromptWork
from cluster.scheduling.budget import StepBudget, is_left_for_item
from cluster.scheduling.chunks import ChunkScheduler, Span
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.worker.cpu_slots import CpuSlots

END_TOKENS = 128  # of a prompt's end
MIN_TOKEN_S = 1e-7  # a token costs something even if the clock stands still


class PromptPlanner:
    """Used on the engine's thread. Knows a sequence from `add` to `remove`."""

    def __init__(self, policy: SchedulingPolicy, budget: StepBudget, cpu_slots: CpuSlots, num_layers: int):
        """`num_layers`: of the model; a step may yield its CPU slot between two layers."""
        self.budget = budget
        self._chunks = ChunkScheduler(policy)
        self._sequences: dict[str, tuple[LanguageRequest, TokenSequence]] = {}  # by sequence id
        self._num_at_start: dict[str, int] = {}  # tokens that were missing in `add`
        self._cpu_slots = cpu_slots
        self._num_layers = num_layers
        self._long_step_s = 0.0  # how long a step of long prompts may last
        self._context = 0.0  # computed tokens that a token of the last step saw, on average

    def add(
        self, request: LanguageRequest, sequence: TokenSequence, ticket: Ticket, spans: Sequence[Span]
    ) -> None:
        """The sequence has its blocks. `spans` are computed in one piece."""
        self._num_at_start[sequence.sequence_id] = sequence.num_missing_tokens
        self._sequences[sequence.sequence_id] = (request, sequence)
        self._chunks.add(ticket, sequence.num_prompt_tokens, spans)
        self._chunks.set_computed(sequence.sequence_id, sequence.num_computed_tokens)
        self._chunks.set_ready(sequence.sequence_id, sequence.num_ready_tokens)

    def remove(self, sequence: TokenSequence) -> None:
        """Sequences that are not in work are ignored."""
        self._chunks.remove(sequence.sequence_id)
        self._sequences.pop(sequence.sequence_id, None)
        self._num_at_start.pop(sequence.sequence_id, None)

    def has_more_ready(self, sequence: TokenSequence) -> None:
        """Embeddings have come. Sequences that are not in work are ignored."""
        if sequence.sequence_id in self._sequences:
            self._chunks.set_ready(sequence.sequence_id, sequence.num_ready_tokens)

    def has_computed(self, sequence: TokenSequence) -> None:
        self._chunks.set_computed(sequence.sequence_id, sequence.num_computed_tokens)

    @property
    def has_runnable(self) -> bool:
        """Whether a token of any prompt could be computed now."""
        return self._chunks.has_runnable

    def can_run(self, request: LanguageRequest) -> bool:
        """Whether tokens of the request could be computed now, in a step of their own."""
        return any(
            self._chunks.is_runnable(sequence.sequence_id) and self._is_worth_a_step(sequence)
            for sequence in request.sequences
        )

    def next_step(self, limit_s: float = math.inf, room: int | None = None) -> tuple[list[PromptWork], bool]:
        """The next step, which should add no more than `limit_s` to the answers that are generated in it; and
        whether it serves only long prompts: prompts longer than the largest step. A step of long prompts
        yields its CPU slot between layers, and each of its layers should last no longer than the time that
        the slot is held at once. The first step of a long prompt is as small as possible: it shows how long
        that time is. Without answers (`limit_s` is infinite) a little text in front of an item that is
        still encoded makes no step: it is left for a step with a prompt that is worth one.

        `room`: tokens above which a step is launched kernel by kernel, which on a GPU takes the host several
        times as long as the device takes to compute them; None: no such limit."""
        step = self._chunks.schedule(self._max_tokens(limit_s, room))
        chosen = self._sequences_of(step)
        left_out: set[str] = set()
        if limit_s == math.inf and chosen and not any(map(self._is_worth_a_step, chosen)):
            # They may have filled the step, and a prompt behind them may be worth one.
            left_out = {
                name for name, (_, sequence) in self._sequences.items() if not self._is_worth_a_step(sequence)
            }
            step = self._chunks.schedule(self._max_tokens(math.inf, room), left_out)
            chosen = self._sequences_of(step)
        if not step:
            return [], False
        largest = self.budget.max_step_tokens
        is_long = all(self._num_at_start[sequence.sequence_id] > largest for sequence in chosen)
        if is_long:
            is_first = any(sequence.num_computed_tokens == sequence.num_cached_tokens for sequence in chosen)
            long_s = 0.0 if is_first else self._long_step_s
            step = self._chunks.schedule(self._max_tokens(min(limit_s, long_s), room), left_out)
        return [PromptWork(*self._sequences[name], num_tokens) for name, num_tokens in step.items()], is_long

    def _max_tokens(self, limit_s: float, room: int | None) -> int:
        tokens = self.budget.max_tokens(self._context, limit_s)
        return tokens if room is None else min(tokens, max(self.budget.min_tokens, room))

    def _sequences_of(self, names: Iterable[str]) -> list[TokenSequence]:
        return [self._sequences[name][1] for name in names]

    def _is_worth_a_step(self, sequence: TokenSequence) -> bool:
        """Whether the tokens that can be computed now contain an item, are all that are missing, or are not
        left for the item behind them."""
        num_ready, num_computed = sequence.num_ready_tokens, sequence.num_computed_tokens
        items = (sequence.prompt.media[i] for i in sequence.items_ready)
        curve = self.budget.fit.curve()
        if (
            curve is None
            or num_ready == sequence.num_prompt_tokens
            or any(item.first_range_after(num_computed) is not None for item in items)
        ):
            return True
        tokens_s = curve.seconds(num_ready - num_computed, num_computed) - curve.fixed_s
        return not is_left_for_item(tokens_s, curve.fixed_s)

    @property
    def token_s(self) -> float | None:
        """How long a token of a prompt's end takes. None before the first step."""
        curve = self.budget.fit.curve()
        return None if curve is None else max(MIN_TOKEN_S, curve.seconds(END_TOKENS) / END_TOKENS)

    def observe(self, works: Sequence[PromptWork], is_long: bool, step_s: float) -> None:
        """A step has computed these tokens in `step_s`. Records of sequences are not updated yet."""
        if is_long:
            self._long_step_s = self._num_layers * self._cpu_slots.mean_slice_s
        num_tokens = sum(work.num_tokens for work in works)
        seen = sum(work.sequence.num_computed_tokens * work.num_tokens for work in works)
        self._context = seen / num_tokens
        self.budget.observe(num_tokens, self._context, step_s)
