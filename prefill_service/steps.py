"""The prompts that a prefill worker has in work, and which of their tokens run in its next step. The size of
a step is learnt from the steps before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.scheduling.budget import StepBudget
from cluster.scheduling.chunks import ChunkScheduler, Span
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.worker.cpu_slots import CpuSlots
from prefill_service.state import PrefillRequest, PromptSequence
from prefill_service.transfer import StepWork


class StepPlanner:
    """Used on the engine's thread. Knows a sequence from `add` to `remove`."""

    def __init__(self, policy: SchedulingPolicy, budget: StepBudget, cpu_slots: CpuSlots, num_layers: int):
        """`num_layers`: of the model; a step may yield its CPU slot between two layers."""
        self._chunks = ChunkScheduler(policy)
        self._sequences: dict[str, tuple[PrefillRequest, PromptSequence]] = {}  # by sequence id
        self._budget = budget
        self._cpu_slots = cpu_slots
        self._num_layers = num_layers
        self._long_step_s = 0.0  # how long a step of long prompts may last
        self._context = 0.0  # computed tokens that a token of the last step saw, on average

    def add(
        self, request: PrefillRequest, sequence: PromptSequence, ticket: Ticket, spans: Sequence[Span]
    ) -> None:
        """The sequence has its blocks. `spans` are computed in one piece."""
        self._sequences[sequence.sequence_id] = (request, sequence)
        self._chunks.add(ticket, sequence.num_tokens, spans)
        self._chunks.set_computed(sequence.sequence_id, sequence.num_computed_tokens)
        self._chunks.set_ready(sequence.sequence_id, sequence.num_ready_tokens)

    def remove(self, sequence: PromptSequence) -> None:
        """Sequences that are not in work are ignored."""
        self._chunks.remove(sequence.sequence_id)
        self._sequences.pop(sequence.sequence_id, None)

    def has_more_ready(self, sequence: PromptSequence) -> None:
        """Embeddings have come. Sequences that are not in work are ignored."""
        if sequence.sequence_id in self._sequences:
            self._chunks.set_ready(sequence.sequence_id, sequence.num_ready_tokens)

    def has_computed(self, sequence: PromptSequence) -> None:
        self._chunks.set_computed(sequence.sequence_id, sequence.num_computed_tokens)

    def can_run(self, request: PrefillRequest) -> bool:
        """Whether a token of the request could be computed now."""
        return any(self._chunks.is_runnable(sequence.sequence_id) for sequence in request.sequences)

    def next_step(self) -> tuple[list[StepWork], bool]:
        """The next step, and whether it serves only long prompts: prompts longer than the largest step. A
        step of long prompts yields its CPU slot between layers, and each of its layers should last no longer
        than the time that the slot is held at once. The first step of a long prompt is as small as possible:
        it shows how long that time is."""
        chunks = self._chunks.schedule(self._budget.max_tokens(self._context))
        chosen = [self._sequences[chunk.request_id][1] for chunk in chunks]
        is_long = all(sequence.num_missing_at_start > self._budget.max_step_tokens for sequence in chosen)
        if is_long:
            is_first = any(sequence.num_computed_tokens == sequence.num_cached_tokens for sequence in chosen)
            limit_s = 0.0 if is_first else self._long_step_s
            chunks = self._chunks.schedule(self._budget.max_tokens(self._context, limit_s))
        return [(*self._sequences[chunk.request_id], chunk.num_scheduled_tokens) for chunk in chunks], is_long

    def observe(self, works: Sequence[StepWork], is_long: bool) -> None:
        """A step with these sequences has run. Their records are not updated yet."""
        if is_long:
            self._long_step_s = self._num_layers * self._cpu_slots.mean_slice_s
        num_tokens = sum(count for _, _, count in works)
        self._context = sum(sequence.num_computed_tokens * count for _, sequence, count in works) / num_tokens
        self._budget.observe(num_tokens, self._context, self._cpu_slots.ran_s)
