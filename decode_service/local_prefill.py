"""Prompts, or their ends, whose KV this worker computes itself, a stretch between two decode steps.

A stretch is one forward over the next tokens of whoever is first by virtual deadline, and of those behind him that fit: of as many
tokens as last `LOCAL_PREFILL_STEP_S`, by what the stretches before have taken, so nobody who runs waits longer than that; a block at least.
Text only: of every family, on any number of ranks, whether answers are speculated or not. The engine's: its thread, its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.fit import StepFit
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.scheduling.queue import WaitingQueue
from cluster.worker.blame import Blame
from cluster.worker.cpu_slots import CpuSlots
from decode_service.runner import DecodeRunner
from decode_service.state import DecodeRequest, PromptPart

LOCAL_PREFILL_STEP_S = 0.05  # that the others wait
MAX_LOCAL_PREFILL_TOKENS = 1024  # what a step is given room for
WARM_UP_TOKENS = 128
WARM_UP_ROUNDS = 3  # the first one shows what is done once
MIN_TOKEN_S = 1e-7  # a clock that stands still does not make computing free


_Part = tuple[DecodeRequest, PromptPart]


class LocalPrefill:
    def __init__(
        self,
        runner: DecodeRunner,
        cpu_slots: CpuSlots,
        policy: SchedulingPolicy,
        block_size: int,
        max_tokens: int,
        blame: Blame,
        probe: Callable[[], None],
    ):
        """`max_tokens`: of one stretch. `probe`: see `Blame.together`."""
        self._runner = runner
        self._cpu_slots = cpu_slots
        self._budget = StepBudget(LOCAL_PREFILL_STEP_S, min(block_size, max_tokens), max_tokens)
        self._queue = WaitingQueue(policy)
        self._requests: dict[str, DecodeRequest] = {}
        self._blame = blame
        self._probe = probe

    def __bool__(self) -> bool:
        return bool(self._requests)

    def warm_up(self, blocks: BlockPool) -> None:
        """Learns how fast this worker is, with blocks that nobody uses."""
        table = blocks.allocate(min(-(-WARM_UP_TOKENS // blocks.block_size), blocks.num_free))
        most = min(WARM_UP_TOKENS, len(table) * blocks.block_size, self._budget.max_step_tokens)
        for _ in range(WARM_UP_ROUNDS):
            for num_tokens in (self._budget.min_tokens, most):
                self._compute([PromptPart([0] * num_tokens, 0, 0, table)])
        blocks.free(table)

    @property
    def fit(self) -> StepFit:
        """How long a stretch takes."""
        return self._budget.fit

    @property
    def token_s(self) -> float | None:
        """For a token of a prompt's end; None before the first stretch."""
        curve = self.fit.curve()
        return None if curve is None else max(MIN_TOKEN_S, curve.seconds(WARM_UP_TOKENS) / WARM_UP_TOKENS)

    def add(self, ticket: Ticket, request: DecodeRequest) -> None:
        """Its prompt's tokens from `num_computed_tokens` on, at least one, are to be computed."""
        self._queue.push(ticket)
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Unknown ones are ignored."""
        self._queue.remove(request_id)
        self._requests.pop(request_id, None)

    def run(self) -> list[DecodeRequest]:
        """One stretch, when somebody waits for it. Returns those whose prompts are complete now, with their first tokens if they
        are drawn here; they are forgotten here. Blocks."""
        parts: list[_Part] = []
        room = self._budget.max_tokens(self._context())
        while self._queue and room > 0:
            request = self._requests[self._queue.peek().request_id]
            part = self._blame.run(request.request_id, request.next_part, room)
            if part is None:
                continue
            parts.append((request, part))
            room -= len(part.token_ids)
            if request.num_missing_tokens == 0:
                self.remove(request.request_id)
        done = self._blame.together(parts, self._compute_parts, _id_of, self._probe) if parts else []
        for (request, _), drawn in done:
            request.computing_s += self._cpu_slots.ran_s
            if drawn:
                request.ready = msgspec.structs.replace(request.ready, first_tokens=drawn)
        return [request for (request, _), _ in done if request.num_missing_tokens == 0]

    def _context(self) -> int:
        return self._requests[self._queue.peek().request_id].num_computed_tokens

    def _compute_parts(self, parts: Sequence[_Part]) -> list[tuple[int, ...]]:
        return self._compute([part for _, part in parts])

    def _compute(self, parts: Sequence[PromptPart]) -> list[tuple[int, ...]]:
        with self._cpu_slots.acquire():
            drawn = self._runner.compute(parts)
        num_tokens = sum(len(part.token_ids) for part in parts)
        context = sum(part.start * len(part.token_ids) for part in parts) / num_tokens
        self._budget.observe(num_tokens, context, self._cpu_slots.ran_s)
        return drawn


def _id_of(part: _Part) -> str:
    return part[0].request_id
