"""What scheduling costs in a step of an engine, with 512 requests running and 512 waiting; and what the queue
costs.

    python -m bench.scheduler --steps 3000

A step's updates are everything that the engine reports to the scheduler: the progress of every chunk, a
prompt from the queue for each finished prompt, new arrivals, and embeddings that arrived.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.arguments import parser_of
from cluster.scheduling.chunks import ChunkScheduler, Span
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.scheduling.queue import WaitingQueue
from cluster.scheduling.running import select_batch

POLICY = SchedulingPolicy(aging_s=10, tokens_per_s=10_000, text_share=0.5)
IMAGE_TOKENS = 256


@dataclass(frozen=True)
class SimplePrompt:
    ticket: Ticket
    num_tokens: int
    uncut_spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class DecodeRow:
    request_id: str
    priority: int = 0
    arrived_at: float = 0
    num_sequences: int = 1


def mixed_prompt(number: int, rng: random.Random) -> SimplePrompt:
    """Half of the prompts are text, a quarter have images that may not be cut, a quarter long videos."""
    arrived_at, kind = number / 100, number % 4
    if kind < 2:
        num_tokens, spans = rng.randint(16, 1024), ()
    elif kind == 2:
        num_images = rng.randint(1, 8)
        num_tokens = num_images * (IMAGE_TOKENS + 8)
        spans = tuple(
            (i * (IMAGE_TOKENS + 8), i * (IMAGE_TOKENS + 8) + IMAGE_TOKENS) for i in range(num_images)
        )
    else:
        num_tokens, spans = 7680, ()
    return SimplePrompt(Ticket(str(number), arrived_at, num_tokens, is_text=kind < 2), num_tokens, spans)


def image_prompt(number: int, rng: random.Random) -> SimplePrompt:
    """One image that may not be cut. If the step has too little room for it, the scheduler tries and skips
    every running prompt.
    """
    ticket = Ticket(str(number), number / 100, IMAGE_TOKENS, is_text=False)
    return SimplePrompt(ticket, IMAGE_TOKENS, ((0, IMAGE_TOKENS),))


class SchedulerLoad:
    """A scheduler with always `num_running` running prompts and a queue of always `num_waiting`."""

    def __init__(
        self,
        make: Callable[[int, random.Random], SimplePrompt],
        num_running: int,
        num_waiting: int,
        budget: int,
    ):
        self._make, self._num_running, self._num_waiting, self._budget = (
            make,
            num_running,
            num_waiting,
            budget,
        )
        self._rng = random.Random(0)
        self._chunks, self._queue = ChunkScheduler(POLICY), WaitingQueue(POLICY)
        self._prompts: dict[str, SimplePrompt] = {}
        self._num_computed: dict[str, int] = {}
        self._num_made = 0
        self._refill()

    def step(self) -> int:
        step = self._chunks.schedule(self._budget)
        for request_id, num_tokens in step.items():
            computed = self._num_computed[request_id] + num_tokens
            if computed < self._prompts[request_id].num_tokens:
                self._num_computed[request_id] = computed
                self._chunks.set_computed(request_id, computed)
            else:
                self._chunks.remove(request_id)
                del self._num_computed[request_id], self._prompts[request_id]
        self._refill()
        return len(step)

    def _refill(self) -> None:
        while len(self._chunks) < self._num_running:
            self._arrive()
            ticket = self._queue.pop()
            prompt = self._prompts[ticket.request_id]
            self._chunks.add(ticket, prompt.num_tokens, prompt.uncut_spans)
            self._chunks.set_ready(ticket.request_id, prompt.num_tokens)
            self._num_computed[ticket.request_id] = 0
        while len(self._queue) < self._num_waiting:
            self._arrive()

    def _arrive(self) -> None:
        prompt = self._make(self._num_made, self._rng)
        self._num_made += 1
        self._prompts[prompt.ticket.request_id] = prompt
        self._queue.push(prompt.ticket)


def measure(name: str, call: Callable[[], object], num_calls: int) -> None:
    took_us = []
    for _ in range(num_calls):
        started = time.perf_counter_ns()
        call()
        took_us.append((time.perf_counter_ns() - started) / 1000)
    took_us.sort()
    print(f"{name:58} {took_us[num_calls // 2]:8.1f} {took_us[num_calls * 99 // 100]:8.1f}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    print(f"{'microseconds':58} {'median':>8} {'p99':>8}")
    for num in (32, 512, 4096):
        load = SchedulerLoad(mixed_prompt, num, num, 2048)
        measure(f"step: {num} running + {num} waiting, 2,048 tokens", load.step, args.steps)
    images = SchedulerLoad(image_prompt, 512, 512, IMAGE_TOKENS + 16)
    measure("step: 512 + 512, one image at a time may run", images.step, args.steps)

    rng = random.Random(1)
    queue = WaitingQueue(POLICY)
    for number in range(512):
        queue.push(mixed_prompt(number, rng).ticket)
    tickets = iter([mixed_prompt(512 + i, rng).ticket for i in range(args.steps)])

    def push_and_pop() -> None:
        queue.push(next(tickets))
        queue.pop()

    measure("queue: push + pop among 512", push_and_pop, args.steps)
    rows = deque(DecodeRow(str(i)) for i in range(512))
    measure("decode: select 256 of 512", lambda: select_batch(rows, 256), args.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
