"""The answers that a simulated language worker generates. Between two changes of the batch all steps last
about equally long, so there is no event for a step without prompts: progress is one number, `v`, the steps
in which a sequence that has been there all the time took part, and a sequence ends at the v it joined at plus
its tokens (processor sharing in virtual time; Parekh and Gallager 1993).

While the device computes something else (`pause` to `resume`), v stands still: a step with prompts, or the
call of an encoder on the same device, has a token of each sequence in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from cluster.scheduling.running import choose_victim
from cluster.simulator.attempt import Held
from cluster.simulator.events import EventLoop

if TYPE_CHECKING:
    from cluster.simulator.language import SimLanguage

EPSILON = 1e-6  # of a step


class SimAnswers:
    """Owned by its worker, which it calls for what has ended or has lost its memory."""

    def __init__(
        self, worker: SimLanguage, loop: EventLoop, noise: Callable[[], float], prompt_pause_s: float
    ):
        self._worker, self._loop, self._noise = worker, loop, noise
        self._prompt_pause_s = prompt_pause_s
        self._blocks, self._block_size = worker.blocks, worker.block_size
        self.running: dict[str, Held] = {}
        self.context_tokens = 0.0
        self._ends: list[tuple[float, int, Held]] = []
        self._num_joined = 0
        self._v = 0.0
        self._at = 0.0  # the instant that `v` and the counts belong to
        self._step_s = 0.0
        self._version = 0  # of the plan
        self._is_paused = False

    def __len__(self) -> int:
        return len(self.running)

    @property
    def prompts_limit_s(self) -> float:
        """How long a step of prompts alone may last whose tokens run with these answers."""
        if not self.running:
            return math.inf
        return self._prompt_pause_s + self._worker.answers_fixed_s

    def begin(self, held: Held) -> None:
        """The KV of its prompt is here: it takes part from the next step on."""
        self.advance()
        if not self.running:  # no step is in progress
            self._v = float(math.ceil(self._v - EPSILON))
        held.counted_v = self._v
        held.joined_v = math.ceil(self._v - EPSILON) + self._is_paused
        self._num_joined += 1
        end_v = held.joined_v + held.attempt.num_output_tokens - 1
        heappush(self._ends, (end_v, self._num_joined, held))
        self.running[held.attempt.request_id] = held
        self.context_tokens += held.attempt.num_tokens
        step_s, now = self._worker.true_step_s(), self._loop.now
        wait_s = max(0.0, self._worker.device.free_at - now) if self._is_paused else 0.0
        wait_s += (held.joined_v - self._v - self._is_paused) * step_s
        held.attempt.second_at = now + wait_s + step_s
        self.replan()

    def leave(self, held: Held) -> None:
        """The answer is not continued; the tokens that it has added count as its blocks from now on."""
        if self.running.pop(held.attempt.request_id, None) is None:
            return
        generated = self._v - held.counted_v
        held.num_anonymous += generated / self._block_size
        self.context_tokens -= held.attempt.num_tokens + generated
        if not self.running:
            self.context_tokens = 0.0

    def num_generated(self, held: Held) -> int:
        """Tokens of a running answer, the first one included."""
        most = held.attempt.num_output_tokens - 1
        return 1 + max(0, min(most, int(self._v - held.joined_v + EPSILON)))

    def step_ends_at(self) -> float:
        """When the running step without prompts ends; now, if none runs."""
        self.advance()
        left = math.ceil(self._v - EPSILON) - self._v
        if not self.running or self._is_paused or left <= EPSILON:
            return self._loop.now
        return self._loop.now + left * self._step_s

    def pause(self) -> None:
        """Something else than a step without prompts runs from now on. A step in progress ends first."""
        self.advance()
        self._is_paused = True
        self._version += 1
        if self.running:
            until = float(math.ceil(self._v - EPSILON))
            self._progress(max(0.0, until - self._v))
            self._v = until

    def resume(self) -> None:
        """It is over, with a token of each answer in it."""
        self._is_paused = False
        self._at = self._loop.now
        if self.running:
            self._progress(1.0)
        self._settle()

    def advance(self) -> None:
        """Bring `v` to now."""
        now = self._loop.now
        if self.running and not self._is_paused and self._step_s > 0:
            self._progress((now - self._at) / self._step_s)
        self._at = now

    def replan(self) -> None:
        """Plans the call for the next event, if nothing comes: an answer ends, or memory does."""
        self._version += 1
        if self._is_paused or not self.running:
            return
        while self._ends[0][2].attempt.request_id not in self.running:  # it has left
            heappop(self._ends)
        num = len(self.running)
        steps = max(0.0, self._ends[0][0] - self._v)
        until_full = (self._blocks.num_blocks - self._blocks.num_used) * self._block_size / num
        steps = max(0.0, min(steps, until_full))
        self._step_s = self._worker.true_step_s(more_context=int(steps / 2 * num)) * self._noise()
        self._loop.after(steps * self._step_s, self._wake, self._version)

    def _progress(self, steps: float) -> None:
        self._v += steps
        tokens = steps * len(self.running)
        self.context_tokens += tokens
        self._blocks.grow(tokens / self._block_size)

    def _wake(self, version: int) -> None:
        if version == self._version and not self._worker.is_dead:
            self.advance()
            self._settle()

    def _settle(self) -> None:
        """Answers that have all their tokens end; if memory is out, the newest is preempted."""
        num_before = len(self.running)
        while self._ends and self._ends[0][0] <= self._v + EPSILON:
            held = heappop(self._ends)[2]
            if held.attempt.request_id in self.running:
                self._worker.answered(held)
        while self.running and self._blocks.num_used >= self._blocks.num_blocks - EPSILON:
            victim = choose_victim(held.request for held in self.running.values())
            self._worker.preempt(self.running[victim.request_id])
        if len(self.running) != num_before:
            self._worker.report()
        self.replan()
