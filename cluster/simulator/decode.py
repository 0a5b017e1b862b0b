"""A simulated decode worker. Between two changes of its batch all steps last about equally long, so there is
no event for a step: its progress is one number, `v`, the steps in which a sequence that has been there all
the time took part, and a sequence ends at the v it joined at plus its tokens (processor sharing in virtual
time; Parekh and Gallager 1993)."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush

from cluster.simulator.attempt import SimAttempt
from cluster.simulator.device import Device
from cluster.simulator.events import EventLoop
from cluster.simulator.prefill import SimPrefill
from cluster.simulator.worker import GRANT, ONE_TOKEN, Network, WorkerSpec
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    FinishReason,
    LoadReport,
    Preempted,
    StartDecode,
    TokenEvent,
    Tokens,
)

EPSILON = 1e-6  # of a step


class SimDecode:
    """`local`: computes prompts on the same device, for requests that no prefill worker has a part in; a step
    of the running answers follows each of its calls. Calls of other workers on the device have a token of
    each sequence in them."""

    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        device: Device,
        network: Network,
        noise: Callable[[], float],
        block_size: int,
        local: SimPrefill | None = None,
    ):
        self.spec, self.is_dead, self.local = spec, False, local
        self._loop, self.device, self._network, self._noise = loop, device, network, noise
        self._block_size = block_size
        device.decode = self
        self.attempts: OrderedDict[str, SimAttempt] = OrderedDict()  # with blocks, in order of their grants
        self._waiting: deque[SimAttempt] = deque()
        self._ends: list[tuple[float, int, SimAttempt]] = []
        self._running: dict[str, SimAttempt] = {}
        self._num_joined = 0
        self._v = 0.0
        self._at = 0.0  # the instant that `v` and the counts below belong to
        self._step_s = 0.0
        self._context_tokens = 0.0
        self.num_used_blocks = 0.0
        self._version = 0
        self._is_paused = False
        self._resumed_v = -math.inf
        self.slowdown = 1.0
        self.num_preempted = 0

    def receive(self, attempt: SimAttempt, message: AnyMessage) -> None:
        """From the attempt's door."""
        if isinstance(message, StartDecode):
            self._reserve(attempt)
        elif isinstance(message, Cancel):
            self.cancel(attempt)

    def _reserve(self, attempt: SimAttempt) -> None:
        """Blocks for the prompt, in order of asking."""
        if self.is_dead:
            return
        self._waiting.append(attempt)
        self._grant()

    def join(self, attempt: SimAttempt) -> None:
        """The attempt's KV is here: it takes part from the next step on."""
        if self.is_dead or attempt.request_id not in self.attempts:
            return
        self._advance()
        now = self._loop.now
        if not self._running:  # no step is in progress
            self._v = float(math.ceil(self._v - EPSILON))
        attempt.counted_v = self._v
        rides = self._is_paused and self.local is None
        attempt.joined_v = math.ceil(self._v - EPSILON) + rides
        self._num_joined += 1
        heappush(self._ends, (attempt.joined_v + attempt.num_output_tokens - 1, self._num_joined, attempt))
        self._running[attempt.request_id] = attempt
        self._context_tokens += attempt.num_tokens
        wait_s = self.device.free_at - now if self._is_paused else 0.0
        step_s = self._expected_step_s(0.0)
        wait_s += (attempt.joined_v - self._v - rides) * step_s
        attempt.second_at = now + wait_s + step_s
        self._replan()
        self.report()

    def cancel(self, attempt: SimAttempt) -> None:
        """Frees what the attempt holds here. Repeats, and attempts that are not here, are ignored."""
        if attempt in self._waiting:
            self._waiting.remove(attempt)
        if self.local is not None:
            self.local.cancel(attempt)
        if attempt.request_id in self.attempts:
            self._advance()
            self._release(attempt)
            self._replan()
            self._grant()

    def pause(self, call_s: float) -> float:
        """The step in progress ends first; then the call runs."""
        self._advance()
        self._is_paused = True
        self._version += 1
        if not self._running or self.is_dead or self.spec.curves.decode is None:
            return call_s
        until = float(math.ceil(self._v - EPSILON))
        if self.local is not None:
            until = max(until, self._resumed_v + 1)
        rest = max(0.0, until - self._v)
        rest_s = rest * self._step_s
        self._progress(rest)
        self._v = until
        if self.local is not None:
            return rest_s + call_s
        curve = self.spec.curves.decode
        return rest_s + call_s + self.slowdown * (self._expected_step_s(0.0) - curve.fixed_s)

    def resume(self) -> None:
        self._is_paused = False
        if self.is_dead:
            return
        self._at = self._loop.now
        if self._running and self.local is None:
            self._progress(1.0)
        self._resumed_v = float(math.ceil(self._v - EPSILON))
        self._settle()

    def tell_tokens(self, prefill: SimPrefill) -> None:
        """The tokens so far of answers whose prompts this prefill worker has computed. Doors hear of tokens
        only when something depends on them: at the end of an answer, at a preemption, or, as here, before the
        prefill worker is lost."""
        if self.is_dead:
            return
        self._advance()
        for attempt in self._running.values():
            num_generated = self._num_generated(attempt)
            if attempt.prefill is prefill and num_generated > 1 + attempt.num_told:
                self._tell(attempt, self._tokens(attempt, num_generated))

    def _tell(self, attempt: SimAttempt, *messages: AnyMessage) -> None:
        """The attempt's door."""
        self._network.tell(attempt.door.receive, self.spec.replica_id, *messages)

    def _tokens(
        self, attempt: SimAttempt, num_generated: int, finish_reason: FinishReason | None = None
    ) -> Tokens:
        """The tokens that the door has not been told, of `num_generated`, the first one included."""
        num_new = num_generated - 1 - attempt.num_told
        attempt.num_told += num_new
        return Tokens((TokenEvent(attempt.request_id, ONE_TOKEN * num_new, finish_reason),))

    def _num_generated(self, attempt: SimAttempt) -> int:
        """Tokens of a running answer, the first one included."""
        return 1 + max(0, min(attempt.num_output_tokens - 1, int(self._v - attempt.joined_v + EPSILON)))

    def report(self) -> None:
        """To all doors."""
        load = LoadReport(
            num_running=len(self._running),
            num_waiting=len(self.attempts) - len(self._running) + len(self._waiting),
            num_queued_units=len(self.attempts) + len(self._waiting),
            num_used_blocks=math.ceil(self.num_used_blocks - EPSILON),
            num_context_tokens=int(self._context_tokens),
            num_prompts=0 if self.local is None else len(self.local.attempts),
            num_prompt_tokens=0 if self.local is None else self.local.num_queued_tokens,
        )
        self._network.tell_doors(self.spec.replica_id, Tokens((), load))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def true_step_s(self, num_more: int = 0, more_context: int = 0) -> float:
        """Of the next step with so many sequences and tokens of context more."""
        assert self.spec.curves.decode is not None
        num = len(self._running) + num_more
        if not num:
            return 0.0
        context = (self._context_tokens + more_context) / num
        rounds = max(1.0, num / self.spec.max_batch)
        return self.slowdown * rounds * self.spec.curves.decode.seconds(num / rounds, context)

    def _expected_step_s(self, steps_ahead: float) -> float:
        return self.true_step_s(0, int(steps_ahead * len(self._running)))

    def _grant(self) -> None:
        """Blocks for the attempts that wait, as far as they go."""
        has_granted = False
        while self._waiting:
            attempt = self._waiting[0]
            need = -(-attempt.num_tokens // self._block_size)
            if self.num_used_blocks + need > self.spec.num_blocks:
                break
            has_granted = True
            self._waiting.popleft()
            attempt.num_blocks = need
            self.num_used_blocks += need
            self.attempts[attempt.request_id] = attempt
            if self.local is not None and attempt.prefill is self.local:
                self.local.start(attempt)
            else:
                self._tell(attempt, DecodeGranted(attempt.request_id, GRANT))
        if has_granted:
            self._advance()
            self._replan()

    def _advance(self) -> None:
        """Bring `v` to now."""
        now = self._loop.now
        if self._running and not self._is_paused and self._step_s > 0:
            self._progress((now - self._at) / self._step_s)
        self._at = now

    def _progress(self, steps: float) -> None:
        self._v += steps
        tokens = steps * len(self._running)
        self._context_tokens += tokens
        self.num_used_blocks += tokens / self._block_size

    def _replan(self) -> None:
        """When something happens next, if nothing comes: an answer ends, or memory does."""
        self._version += 1
        if self._is_paused or not self._running:
            return
        while self._ends[0][2].request_id not in self._running:  # cancelled
            heappop(self._ends)
        num = len(self._running)
        steps = max(0.0, self._ends[0][0] - self._v)
        until_full = (self.spec.num_blocks - self.num_used_blocks) * self._block_size / num
        steps = max(0.0, min(steps, until_full))
        self._step_s = self._expected_step_s(steps / 2) * self._noise()
        self._loop.after(steps * self._step_s, self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version == self._version and not self.is_dead:
            self._advance()
            self._settle()

    def _settle(self) -> None:
        """Attempts that have all their tokens end; if memory is out, the newest is preempted."""
        has_changed = False
        while self._ends and self._ends[0][0] <= self._v + EPSILON:
            attempt = heappop(self._ends)[2]
            if attempt.request_id not in self._running:
                continue
            self._release(attempt)
            self._tell(attempt, self._tokens(attempt, attempt.num_output_tokens, FinishReason.LENGTH))
            has_changed = True
        while self._running and self.num_used_blocks >= self.spec.num_blocks - EPSILON:
            self._preempt()
            has_changed = True
        if has_changed:
            self._grant()
            self.report()
        self._replan()

    def _preempt(self) -> None:
        newest = max(self._running.values(), key=lambda f: (f.request.priority, f.request.arrived_at))
        self.num_preempted += 1
        tokens = self._tokens(newest, self._num_generated(newest))
        self._release(newest)
        self._tell(newest, tokens, Preempted(newest.request_id))

    def _release(self, attempt: SimAttempt) -> None:
        """Its blocks, and the tokens that it has added."""
        self.attempts.pop(attempt.request_id, None)
        generated = 0.0
        if self._running.pop(attempt.request_id, None) is not None:
            generated = self._v - attempt.counted_v
            self._context_tokens -= attempt.num_tokens + generated
        self.num_used_blocks -= attempt.num_blocks + generated / self._block_size
        attempt.num_blocks = 0
        if not self._running:
            self._context_tokens = 0.0
        if not self.attempts:
            self.num_used_blocks = 0.0
