"""A simulated language worker, of any role: the engine's own objects say which prompts get memory
(`PromptAdmission`, `WaitingQueue`) and which of their tokens run in a step (`PromptPlanner`, with the step
times that it learns, and with `prompt_pause_s` with answers), in the engine's own records
(`LanguageRequest`). Durations follow from curves; answers progress without an event for each step
(`SimAnswers`). Blocks of prompts are kept for reuse, those of answers are not.

As in the real engine, what comes during a step waits for its end; so a prompt can reuse what the step has
computed. `LanguageEngine` itself is not run: without a model it takes 18 to 23 us for a token of an answer
(AMD EPYC, AVX-512 BF16, 2 cores): for a request of 237 tokens twice as long as all else in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster.clock import SystemClock
from cluster.engine.events import first_events
from cluster.engine.planner import PromptPlanner
from cluster.engine.state import FirstTokens, LanguagePhase, PromptWork
from cluster.engine.timing import Part
from cluster.scheduling.admission import PromptAdmission, heads
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.chunks import usable_prefix
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.scheduling.queue import WaitingQueue
from cluster.simulator.answers import EPSILON, SimAnswers
from cluster.simulator.attempt import Held, SimAttempt, hold
from cluster.simulator.caches import BlockCache
from cluster.simulator.device import Device
from cluster.simulator.events import EventLoop
from cluster.simulator.features import Features
from cluster.simulator.hardware import Chunks, Model, mean_context, step_s
from cluster.simulator.kv import KvSender
from cluster.simulator.worker import GRANT, ONE_TOKEN, Network, WorkerSpec
from cluster.types.messages import (
    AnyMessage,
    BlocksChanged,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    EncoderLost,
    FinishReason,
    LoadReport,
    Preempted,
    PrefillAdmitted,
    StartDecode,
    StartPrefill,
    TokenEvent,
    Tokens,
)
from cluster.worker.cpu_slots import no_cpu_slots


class SimLanguage:
    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        device: Device,
        network: Network,
        policy: SchedulingPolicy,
        noise: Callable[[], float],
        model: Model,
    ):
        self.spec, self.is_waiting, self.is_dead, self.slowdown = spec, False, False, 1.0
        self._loop, self.device, self._network = loop, device, network
        self._noise, self.block_size = noise, model.block_size
        device.language = self
        self.blocks = BlockCache(spec.num_blocks)
        self._admission = PromptAdmission(policy, spec.num_blocks)
        self._arrivals = WaitingQueue(policy)
        self.planner = PromptPlanner(policy, self.budget(), no_cpu_slots(SystemClock()), model.num_layers)
        self.answers = SimAnswers(self, loop, noise, policy.prompt_pause_s)
        self.held: dict[str, Held] = {}  # by request id
        self.coming: dict[str, SimAttempt] = {}  # on the way to here, to be computed; for `Oracle`
        self._asked: list[Held] = []  # of these, those that wait for the end of a step …
        self._step_ends_at = -math.inf  # … which ends then
        self._features = Features(self._tell)
        self._kv_sender = KvSender(loop, model, self._sent)
        self.batch: list[PromptWork] = []  # prompts in the running step
        self._is_long = False  # see `PromptPlanner.next_step`
        self._prompts_s = 0.0  # what that step takes longer because of them
        self.context = 0.0  # computed tokens that a token of a prompt saw in the last step, on average
        self.num_queued_tokens = self._num_prompts = self._num_sending_blocks = 0
        self._num_answers = self._num_admitted = 0  # that are, or will be, generated here; with blocks
        self.num_preempted = 0

    def budget(self) -> StepBudget:
        """The budget of a real engine at its start: it learns how long steps last, up to the largest one."""
        curves, size = self.spec.curves, self.block_size
        budget = StepBudget(self.spec.step_target_s, size, max(curves.max_step_units, size))
        while curves.prefill is not None and size < 2 * budget.max_step_tokens:
            tokens = min(size, budget.max_step_tokens)
            budget.observe(tokens, 0.0, curves.prefill.seconds(tokens))
            size *= 2
        return budget

    @property
    def max_step_tokens(self) -> int:
        """The most prompt tokens of the next step, if they see as much context as those of the last one."""
        return self.planner.budget.max_tokens(self.context, self.answers.prompts_limit_s)

    def true_step_s(self, chunks: Chunks = (), num_more: int = 0, more_context: float = 0) -> float:
        """How long the next step lasts without noise, with these prompts, and so many more answers and tokens
        of context."""
        context, num_answers = self.answers.context_tokens + more_context, len(self.answers) + num_more
        return self.slowdown * step_s(self.spec.curves, self.spec.max_batch, chunks, num_answers, context)

    # Messages of doors, embeddings and KV

    def receive(self, attempt: SimAttempt, message: AnyMessage) -> None:
        """Handles a message of the attempt's door."""
        held = self.held.get(attempt.request_id)
        if self.is_dead:
            return
        if isinstance(message, StartPrefill | StartDecode):
            self._take(hold(attempt, self, self._loop.now), message)
        elif isinstance(message, DecodeTarget) and held is not None:
            self._kv_sender.granted(held)
        elif isinstance(message, EncoderLost) and held is not None:
            self._features.renew(held, message.item_idx)
        elif isinstance(message, Cancel) and message.item_idx is None:
            attempt.is_cancelled = True
            if held is not None:
                self.answers.advance()
                self._end(held)
                self.answers.replan()

    def _take(self, held: Held, start: StartPrefill | StartDecode) -> None:
        """Room for its embeddings is reserved at once."""
        self.coming.pop(held.attempt.request_id, None)
        self.held[held.attempt.request_id] = held
        self._num_answers += not held.request.sends
        self._features.reserve(held, start)
        self._asked.append(held)
        self._go_on()

    def item_ready(self, media_hash: str) -> None:
        """An encoder has brought the item, for all prompts that share it."""
        if self.is_dead:
            return
        for held in self._features.arrived(media_hash):
            self.planner.has_more_ready(held.sequence)
            if held.request.phase is LanguagePhase.COMPUTING:
                self._note_waiting(held)
        self._wake()

    def arrived(self, attempt: SimAttempt) -> None:
        """All KV of the prompt is here."""
        held = self.held.get(attempt.request_id)
        if held is not None and not self.is_dead:
            held.sequence.arrived(position_delta=0)
            held.name_blocks(self.blocks, self.block_size)
            self._answer(held)

    def _go_on(self) -> None:
        """Goes on at the end of the running step: requests enter, prompts are computed."""
        if self.batch or self._step_ends_at > self._loop.now:
            return
        self._step_ends_at = self.answers.step_ends_at()
        if self._step_ends_at > self._loop.now:
            return self._loop.at(self._step_ends_at, self._between_steps)
        self._between_steps()

    def _between_steps(self) -> None:
        if not self.is_dead and not self.batch:
            self._take_in()
            self._wake()

    def _wake(self) -> None:
        if self._num_prompts:
            self.device.wake(self)

    # Intake: as `cluster.engine.intake`

    def _take_in(self) -> None:
        asked, self._asked = self._asked, []
        for held in asked:
            if held.attempt.request_id in self.held:  # else it has been cancelled
                held.request.stopwatch.turn_to(Part.BLOCKS, self._loop.now)
                held.is_counted = held.request.computes
                self.num_queued_tokens += held.num_missing
                self._num_prompts += held.is_counted
                ticket = held.ticket(held.attempt.num_tokens)
                if held.request.computes:
                    self._admission.push(ticket, self._num_blocks(held))
                else:
                    self._arrivals.push(ticket)
        while any(
            self._try_admit(ticket) for ticket in heads(self._admission, self._arrivals, self._may_send)
        ):
            pass
        self.report()

    def _may_send(self, request_id: str) -> bool:
        held = self.held[request_id]
        if not (held.request.sends and self.spec.role.decodes and self._num_sending_blocks):
            return True
        return self._num_sending_blocks + self._num_blocks(held) <= self.blocks.num_blocks // 2

    def _num_blocks(self, held: Held) -> int:
        return -(-held.attempt.num_tokens // self.block_size)

    def _try_admit(self, ticket: Ticket) -> bool:
        held = self.held[ticket.request_id]
        request, num_blocks, size = held.request, self._num_blocks(held), self.block_size
        if not (self._may_send(ticket.request_id) and self._admission.has_share(ticket, num_blocks)):
            return False
        num_cached = self.blocks.match(held.attempt.request.block_hashes) * size
        if request.computes:
            num_cached = usable_prefix(num_cached, held.attempt.num_tokens, size, ())
        shared = list(held.attempt.request.block_hashes[: num_cached // size])
        if not self.blocks.try_take(shared, num_blocks - len(shared), self._num_admitted):
            return False
        held.hold_blocks(shared, num_blocks - len(shared), num_cached)
        self._num_sending_blocks += request.sends * num_blocks
        self._num_admitted += not request.sends
        if request.computes:
            self._admission.admit(ticket, num_blocks)
            self._compute(held)
        else:
            self._arrivals.remove(ticket.request_id)
            request.move(LanguagePhase.ARRIVING)
            self._tell(held, DecodeGranted(ticket.request_id, GRANT))
        return True

    def _compute(self, held: Held) -> None:
        request, sequence = held.request, held.sequence
        request.move(LanguagePhase.COMPUTING)
        self.num_queued_tokens -= sequence.num_cached_tokens
        self._features.release(held, sequence.num_cached_tokens)
        self._features.want(held)
        self.planner.add(request, sequence, held.ticket(sequence.num_missing_tokens), ())
        self._note_waiting(held)
        if request.sends:
            self._tell(held, PrefillAdmitted(request.request_id))

    def _note_waiting(self, held: Held) -> None:
        if all(work.request is not held.request for work in self.batch):
            part = Part.QUEUED if self.planner.can_run(held.request) else Part.MEDIA
            held.request.stopwatch.turn_to(part, self._loop.now)

    # Steps with prompts

    def begin(self) -> float | None:
        if self.is_dead:
            return None
        ends_at = self.answers.step_ends_at()
        if ends_at > self._loop.now:
            self._loop.at(ends_at, self._wake)
            return None
        if self._asked:
            self._take_in()
        self.batch, self._is_long = self.planner.next_step(self.answers.prompts_limit_s)
        if not self.batch:
            return None
        for work in self.batch:
            work.request.stopwatch.turn_to(Part.COMPUTING, self._loop.now)
        chunks = [(work.sequence.num_computed_tokens, work.num_tokens) for work in self.batch]
        self.context = mean_context(chunks)
        took_s = self.true_step_s(chunks) * self._noise()
        self._prompts_s = max(0.0, took_s - max(0.0, self.true_step_s() - self.answers_fixed_s))
        self.answers.pause()
        return took_s

    @property
    def answers_fixed_s(self) -> float:
        """The part of a step of answers alone that does not depend on their number."""
        curve = self.spec.curves.decode
        return 0.0 if curve is None else self.slowdown * curve.fixed_s

    def finish(self, took_s: float) -> None:
        if self.is_dead:
            return
        self.planner.observe(self.batch, self._is_long, self._prompts_s)
        batch, self.batch = self.batch, []
        self.answers.resume()
        for work in batch:
            held = self.held.get(work.request.request_id)
            if held is not None:
                self._advance(held, work.num_tokens, took_s)
        self._between_steps()

    def _advance(self, held: Held, num_tokens: int, took_s: float) -> None:
        request, sequence = held.request, held.sequence
        sequence.computed(num_tokens)
        self.num_queued_tokens -= num_tokens
        held.name_blocks(self.blocks, self.block_size)
        self._features.release(held, sequence.num_computed_tokens)
        self._kv_sender.computed(held, took_s)
        if not sequence.is_complete:
            self.planner.has_computed(sequence)
            return self._note_waiting(held)
        self.planner.remove(sequence)
        self._num_prompts -= 1
        held.is_counted = False
        (event,) = first_events(request, FirstTokens(ONE_TOKEN), self._loop.now)
        self._tell(held, Tokens((event,)))
        if event.finish_reason is not None:  # an answer of one token
            self._end(held)
        elif not request.sends:
            self._answer(held)

    def _answer(self, held: Held) -> None:
        held.request.move(LanguagePhase.RUNNING)
        self._admission.remove(held.attempt.request_id)
        self.answers.begin(held)
        self.report()

    def ride(self, call_s: float) -> float:
        """An encoder's call of so many seconds begins on this worker's device. Returns how long it lasts with
        a step of the answers in it, after the step that runs."""
        rest_s = self.answers.step_ends_at() - self._loop.now
        self.answers.pause()
        if self.is_dead or not self.answers.running:
            return call_s
        return rest_s + call_s + max(0.0, self.true_step_s() - self.answers_fixed_s)

    def resume(self) -> None:
        """The encoder's call is over."""
        if not self.is_dead:
            self.answers.resume()

    # Ends

    def _sent(self, held: Held) -> None:
        """All KV is at the worker that generates the answer."""
        if not self.is_dead and self.held.get(held.attempt.request_id) is held:
            self._end(held)
            held.attempt.decode.arrived(held.attempt)

    def answered(self, held: Held) -> None:
        tokens = self._tokens(held, held.attempt.num_output_tokens, FinishReason.LENGTH)
        self._end(held)
        self._tell(held, tokens)

    def preempt(self, held: Held) -> None:
        self.num_preempted += 1
        tokens = self._tokens(held, self.answers.num_generated(held))
        self._end(held)
        self._tell(held, tokens, Preempted(held.attempt.request_id))

    def _end(self, held: Held) -> None:
        """The worker has nothing more to do for the attempt; blocks with a hash are kept."""
        request_id, sends = held.attempt.request_id, held.request.sends
        self._features.release(held, held.attempt.num_tokens)
        del self.held[request_id]
        if held.is_counted:
            self.num_queued_tokens -= held.num_missing
            self._num_prompts -= 1
        self.planner.remove(held.sequence)
        self._admission.remove(request_id)
        self._arrivals.remove(request_id)
        self.answers.leave(held)
        self._num_answers -= not sends
        if held.has_blocks:
            self._num_sending_blocks -= sends * self._num_blocks(held)
            self._num_admitted -= not sends
            self.blocks.free(held.shared, held.num_anonymous)
        if not self.held:
            self.blocks.num_anonymous = 0.0
        if self._asked or self._arrivals or self._admission.heads():
            self._go_on()

    def tell_tokens(self, lost: SimLanguage) -> None:
        """The tokens so far of answers in which that worker has a part. Doors hear of tokens only when
        something depends on them: at an answer's end, at a preemption, or here, before a worker is lost."""
        self.answers.advance()
        for held in self.answers.running.values():
            num_generated = self.answers.num_generated(held)
            if lost in (self, held.attempt.prefill) and num_generated > 1 + held.num_told:
                self._tell(held, self._tokens(held, num_generated))

    def _tokens(self, held: Held, num_generated: int, finish_reason: FinishReason | None = None) -> Tokens:
        """The tokens that the door has not received, of `num_generated`, the first one included."""
        num_new = num_generated - 1 - held.num_told
        held.num_told += num_new
        return Tokens((TokenEvent(held.attempt.request_id, ONE_TOKEN * num_new, finish_reason),))

    def report(self) -> None:
        """Sends a report to all doors."""
        generates, num_in_work = self.spec.role.decodes, len(self.answers) + self._num_prompts
        load = LoadReport(
            num_running=num_in_work,
            num_waiting=max(0, len(self.held) - num_in_work),
            num_queued_units=self._num_answers if generates else self.num_queued_tokens,
            num_used_blocks=math.ceil(self.blocks.num_used - EPSILON),
            num_cached_blocks=self.blocks.num_cached,
            num_context_tokens=int(self.answers.context_tokens),
            num_prompts=self._num_prompts if generates else 0,
            num_prompt_tokens=self.num_queued_tokens if generates else 0,
        )
        added, evicted = self.blocks.changes.take()
        changes = [BlocksChanged(added, evicted)] if added or evicted else []
        self._network.tell_doors(self.spec.replica_id, Tokens((), load), *changes)

    def _tell(self, held: Held, *messages: AnyMessage) -> None:
        """The attempt's door."""
        self._network.tell(held.attempt.door.receive, self.spec.replica_id, *messages)
