"""Local prefill: prompts, or ends of prompts, whose KV this decode worker computes itself, in local prefill
steps between two decode steps.

A local prefill step is one forward over the next tokens of the most urgent request (by virtual deadline), and
of the requests behind it that fit. It has as many tokens as last `LOCAL_PREFILL_STEP_S`, by what earlier
steps have taken, so no running request waits longer than that; at least one block. If no request runs, it may
last `LONE_STEP_S`: each step reads all weights, so many short ones would double a lone prompt's time. Only
text prompts: of every model family, on any number of ranks, with or without speculation. Used by the engine,
on its thread.
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

LOCAL_PREFILL_STEP_S = 0.05  # how long running requests wait
LONE_STEP_S = 0.5  # how long a request waits that comes while no other one runs; as a prefill worker's step
MAX_LOCAL_PREFILL_TOKENS = 1024  # largest step, for which memory is planned
WARM_UP_TOKENS = 128
WARM_UP_ROUNDS = 3  # the first one includes what is done only once
MIN_TOKEN_S = 1e-7  # a token costs something even if the clock stands still


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
        """`max_tokens`: of one local prefill step. `probe`: see `Blame.together`."""
        self._runner = runner
        self._cpu_slots = cpu_slots
        self._budget = StepBudget(LONE_STEP_S, min(block_size, max_tokens), max_tokens)
        self._queue = WaitingQueue(policy)
        self._requests: dict[str, DecodeRequest] = {}
        self._blame = blame
        self._probe = probe

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def num_prompts(self) -> int:
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of these prompts that are left."""
        return sum(request.num_missing_tokens for request in self._requests.values())

    def warm_up(self, blocks: BlockPool) -> None:
        """Measures how fast this worker computes prompts, with blocks that belong to no request."""
        table = blocks.allocate(min(-(-WARM_UP_TOKENS // blocks.block_size), blocks.num_free))
        max_tokens = min(WARM_UP_TOKENS, len(table) * blocks.block_size, self._budget.max_step_tokens)
        for _ in range(WARM_UP_ROUNDS):
            for num_tokens in (self._budget.min_tokens, max_tokens):
                self._compute([PromptPart([0] * num_tokens, 0, 0, table)])
        blocks.free(table)

    @property
    def fit(self) -> StepFit:
        """How long a local prefill step takes."""
        return self._budget.fit

    @property
    def token_s(self) -> float | None:
        """How long a token of a prompt's end takes. None before the first local prefill step."""
        curve = self.fit.curve()
        return None if curve is None else max(MIN_TOKEN_S, curve.seconds(WARM_UP_TOKENS) / WARM_UP_TOKENS)

    def add(self, ticket: Ticket, request: DecodeRequest) -> None:
        """The tokens of the request's prompt from `num_computed_tokens` on, at least one, are to be
        computed."""
        self._queue.push(ticket)
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Unknown requests are ignored."""
        self._queue.remove(request_id)
        self._requests.pop(request_id, None)

    def run(self, *, is_alone: bool) -> list[DecodeRequest]:
        """One local prefill step, if a request waits for it. `is_alone`: no request runs that would wait.
        Returns the requests whose prompts are complete now, with their first tokens if they are drawn here,
        and forgets them. Blocks."""
        parts: list[_Part] = []
        limit_s = LONE_STEP_S if is_alone else LOCAL_PREFILL_STEP_S
        room = self._budget.max_tokens(self._context(), limit_s)
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
