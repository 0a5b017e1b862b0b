"""The language engine: owns every request of a worker and the pool of its KV blocks.

A step:
1. requests get blocks, in the order of admission; cached prefixes are reused (`Intake`);
2. one packed forward is computed (`StepForward`): the next token of every answer, with drafts behind it, and
   the next tokens of prompts, as many as the step's time allows (`PromptPlanner`). After each layer the KV of
   prompts is posted to the worker that wants it;
3. tokens are drawn, and the doors are told.

A prompt is computed here, or its KV arrives (`KvInput`). An answer is generated here (`Answers`), or the KV
is sent to the worker that generates it (`KvOutput`). `StepLimits` say how much of each a worker does.

Runs on the worker's engine thread. Transfer events and messages of doors arrive as calls. An exception that a
request causes ends that request only (`Blame`). How requests end: `Lifecycle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from cluster.clock import Clock
from cluster.engine.adapters import HeldAdapters
from cluster.engine.ahead import ForwardAhead
from cluster.engine.answers import Answers
from cluster.engine.counts import SequenceCounts
from cluster.engine.features import FeatureStore, ItemKey
from cluster.engine.forward import StepForward
from cluster.engine.idle_check import IdleCheck
from cluster.engine.intake import Intake
from cluster.engine.kv_input import KvInput
from cluster.engine.kv_output import KvOutput, send_computed
from cluster.engine.lifecycle import EngineState, Lifecycle, RequestTable
from cluster.engine.limits import StepLimits
from cluster.engine.planner import PromptPlanner
from cluster.engine.prefix_loader import PrefixLoader
from cluster.engine.runner import LanguageRunner
from cluster.engine.state import (
    FirstTokens,
    LanguagePhase,
    LanguageRequest,
    PromptWork,
    WorkResult,
)
from cluster.engine.tables import register_computed
from cluster.engine.timing import Part
from cluster.errors import UnavailableError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.tier import KvTier
from cluster.model.language import LanguageModel
from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.fit import StepFit
from cluster.scheduling.keys import SchedulingPolicy
from cluster.scheduling.queue import WaitingQueue
from cluster.structure.constraints import Constraints
from cluster.types.messages import BlocksChanged, DecodeTotals, LoadReport, StartDecode, StartPrefill
from cluster.types.transfer import KvReady, ReceivedGrant, TierTotals
from cluster.worker.blame import Blame
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.speed import SpeedReporter
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import Aborted, Completed, LateWrite, LeaseEvent, SendEvent
from kv_transfer.lease.transfer import BlockTransfer

_id_of = attrgetter("request_id")
LARGE_CONTEXT = 8192  # tokens that a sequence of a large step sees


class LanguageEngine:
    def __init__(
        self,
        *,
        model: LanguageModel,
        runner: LanguageRunner,
        blocks: BlockPool,
        transfer_engine: BlockTransfer,
        outbox: Outbox,
        clock: Clock,
        policy: SchedulingPolicy,
        limits: StepLimits,
        cpu_slots: CpuSlots,
        features: FeatureStore,
        tier: KvTier | None = None,
        constraints: Constraints | None = None,
        adapters: HeldAdapters | None = None,
        allows_recompute: bool = False,
        runs_ahead: bool = False,
        on_ended: Callable[[str], None] = lambda request_id: None,
    ):
        """`features`: where embeddings arrive. `tier`: the second one of the KV cache. `constraints`: those
        of `runner`. `adapters`: None: no room for any. `allows_recompute`: see `KvInput`. `runs_ahead`: see
        `ForwardAhead`.
        `on_ended(request_id)` is called, on this thread, once for each request whose answer was to be
        generated here, when it leaves the engine."""
        self.runner = runner
        self.blocks = blocks
        self._features = features
        self._transfer_engine = transfer_engine
        self._outbox = outbox
        self._clock = clock
        self._cpu_slots = cpu_slots
        self._limits = limits
        self._prompt_pause_s = policy.prompt_pause_s
        self.requests = RequestTable(clock)
        self._computing: set[str] = set()  # ids of requests whose prompts are computed
        self._counts = SequenceCounts()
        max_tokens = max(limits.max_prompt_tokens, blocks.block_size)
        budget = StepBudget(limits.target_s, blocks.block_size, max_tokens)
        self.fit = StepFit(max(1, limits.max_sequences), LARGE_CONTEXT)  # of steps that only generate answers
        self.planner = PromptPlanner(policy, budget, cpu_slots, model.num_layers)
        self._kv_input = KvInput(transfer_engine, blocks, allows_recompute)
        self._kv_output = KvOutput(transfer_engine, budget, model.kv_layout)
        self._loader = None if tier is None else PrefixLoader(tier, blocks, budget, model.state_blocks)
        state = self._shared_state(policy, constraints, adapters)
        self._lifecycle = Lifecycle(state, outbox, self._unschedule, on_ended)
        self._blame = Blame(self._lifecycle.fail_named)
        self._intake = Intake(model, state, limits, self.planner, self._lifecycle, self._blame, outbox, clock)
        self._ahead = ForwardAhead(state, self._blame, clock, is_on=runs_ahead)
        self._forward = StepForward(model, state, self.planner, self.fit, self._blame, cpu_slots, self._ahead)
        self._answers = Answers(
            state, self._lifecycle, self._blame, self._forward.probe, outbox, clock, model.sliding_window
        )
        self._speed = self._speed_reporter()
        self._idle_check = IdleCheck(blocks, clock)
        if limits.max_prompt_tokens:
            blocks.watch()
            cache = self._loader or blocks
            outbox.greet_with(lambda: BlocksChanged(cache.content(), ()))

    def _shared_state(
        self, policy: SchedulingPolicy, constraints: Constraints | None, adapters: HeldAdapters | None
    ) -> EngineState:
        return EngineState(
            requests=self.requests,
            blocks=self.blocks,
            admission=PromptAdmission(policy, self.blocks.num_blocks),
            arrivals=WaitingQueue(policy),
            counts=self._counts,
            computing=self._computing,
            runner=self.runner,
            features=self._features,
            kv_input=self._kv_input,
            kv_output=self._kv_output,
            loader=self._loader,
            constraints=constraints,
            adapters=adapters,
        )

    def _speed_reporter(self) -> SpeedReporter:
        transfer_engine, limits = self._transfer_engine, self._limits
        return SpeedReporter(
            self._outbox,
            self._clock,
            prefill=self.planner.budget.fit if limits.max_prompt_tokens else None,
            decode=self.fit if limits.max_sequences else None,
            max_step_units=limits.max_prompt_tokens,
            links=lambda: transfer_engine.links,
            codecs=transfer_engine.codecs,
        )

    def step(self) -> float | None:
        self._admit()
        answers = self._answers.next(self._limits.max_sequences)
        prompts, is_long = [], False
        if not (in_flight := self._ahead.computes(answers)):
            room = self.runner.room_for_prompts(answers) if self.planner.has_runnable else None
            # The fixed part of the answers' own step would be spent without prompts, too.
            fixed_s = self.fit.predicted_s(0, self._counts.mean_context) if answers else math.inf
            prompts, is_long = self.planner.next_step(self._prompt_pause_s + fixed_s, room)
        answers = in_flight or answers
        # The load is told before a long step: a report behind it would not count what came meanwhile.
        self._tell_doors(self.load() if prompts or not answers else None)
        if not answers and not prompts:
            self._ahead.drop()
            return self.requests.deadlines.wait_s() if self.requests else self._idle_check.run()
        self._run(answers, prompts, is_long)
        self._tell_doors(None if prompts else self.load())
        return 0

    def admit(self) -> None:
        """The part of a step that computes nothing: requests that have waited too long end, others get
        blocks, and the doors are told."""
        self._admit()
        self._tell_doors(self.load())

    def _admit(self) -> None:
        for request_id in self.requests.deadlines.expired():
            with self._blame.of(request_id):
                self._lifecycle.expire(request_id)
        self._intake.admit()

    def start(self, door: DoorId, message: StartPrefill | StartDecode, came_at: float) -> None:
        """`came_at`: when the message arrived. The engine may have been busy since then."""
        self._idle_check.after_start()
        self._intake.start(door, message, came_at)

    def offer_target(self, request_id: str, grant: ReceivedGrant) -> None:
        """The grant of the worker that generates the answer has arrived. Any thread; `take_targets` must
        follow. If a step is computing this prompt, its KV is sent from the next layer on."""
        self._kv_output.offer(request_id, grant)

    def take_targets(self) -> None:
        for request, error in self._kv_output.take(self.requests):
            with self._blame.of(request.request_id):
                self._on_target(request, error)

    def cancel(self, request_id: str, choice_idx: int | None = None) -> None:
        """Frees a request, or one choice of it, in any state. Unknown and ended requests are ignored."""
        with self._blame.of(request_id):
            self._lifecycle.cancel(request_id, choice_idx)

    def drop_door(self, door: DoorId) -> None:
        # Newest first: otherwise the shared embeddings of a cancelled request would be granted to the next
        # one of the same door.
        for request_id in reversed(self.requests.of_door(door)):
            self.cancel(request_id)

    def on_transfer(self, event: LeaseEvent | LateWrite | SendEvent, at: float) -> None:
        """A transfer of KV has closed at the instant `at`. Called once for each of them."""
        if isinstance(event, LateWrite):
            self._lifecycle.fail_holders(event.block_ids)
        elif (request := self._kv_output.pop_closed(event.lease_id)) is not None:
            with self._blame.of(request.request_id):
                self._lifecycle.on_sent(request, event)
        elif (request := self._kv_input.pop_closed(event.lease_id)) is not None:
            with self._blame.of(request.request_id):
                self._on_arrived(request, event)

    def on_features(self, event: LeaseEvent | LateWrite, at: float) -> None:
        """A lease on the feature memory has closed at the instant `at`. Called once for each of them."""
        if isinstance(event, LateWrite):
            return self._lifecycle.fail_readers(event.block_ids)
        items = self._features.close_lease(event.lease_id, completed=isinstance(event, Completed))
        self.on_items(items, at)

    def on_items(self, items: Sequence[ItemKey], at: float) -> None:
        """The embeddings of these items are here since the instant `at`."""
        for request_id, item_idx in items:
            with self._blame.of(request_id):
                self._on_item(request_id, item_idx, at)

    def load(self) -> LoadReport:
        generates = self._limits.max_sequences > 0
        features, num_in_work = self._features, len(self._answers.running) + len(self._computing)
        return LoadReport(
            num_running=num_in_work,
            num_waiting=len(self.requests) - num_in_work,
            num_queued_units=self._counts.num_sequences if generates else self._lifecycle.num_missing_tokens,
            num_used_blocks=self.blocks.num_blocks - self.blocks.num_free + features.num_used_blocks,
            num_open_leases=self._kv_input.num_open_leases
            + self._kv_output.num_open_leases
            + features.num_open_leases,
            num_cached_blocks=self.blocks.num_cached,
            totals=DecodeTotals(
                self._lifecycle.num_preempted, self.runner.num_drafted, self.runner.num_accepted
            ),
            sent=self._transfer_engine.sent,
            received=self._transfer_engine.received,
            held_bytes=features.held_bytes,
            num_context_tokens=self._counts.num_context_tokens,
            num_prompts=self._lifecycle.num_prompts if generates else 0,
            num_prompt_tokens=self._lifecycle.num_missing_tokens if generates else 0,
            tier=TierTotals() if self._loader is None else self._loader.totals,
            busy_s=self._cpu_slots.busy_s,
            num_pool_faults=self._idle_check.num_faults,
        )

    def _tell_doors(self, load: LoadReport | None) -> None:
        if self._loader is not None:
            self._loader.keep()
        if (changes := (self._loader or self.blocks).take_changes()) is not None:
            self._outbox.broadcast(changes)
        self._speed.report()
        self._outbox.flush(load)

    def _run(self, running: Sequence[LanguageRequest], prompts: Sequence[PromptWork], is_long: bool) -> None:
        # A step with answers, or with a short prompt, keeps its CPU slot: their tokens are worth the pause of
        # other workers.
        with self._cpu_slots.acquire(0.0 if is_long and not running else math.inf):
            answers = self._answers.with_blocks(running)
            requests = dict.fromkeys(work.request for work in prompts)
            began_at = self._clock.now()
            for request in requests:
                request.stopwatch.turn_to(Part.COMPUTING, began_at)
            is_all = len(answers) + self._answers.num_waiting == len(self._answers.running)
            done = self._forward.run(answers, prompts, is_all=is_all)
        self._forward.learn([work for work, _ in done], is_long)
        for work, result in done:
            with self._blame.of(work.request_id):
                if isinstance(work, LanguageRequest):
                    self._answers.advance(work, result)
                elif work.request_id in self._computing:
                    self._advance_prompt(work, result)
        self._end_prompts([request for request in requests if request.request_id in self._computing])

    def _advance_prompt(self, work: PromptWork, result: WorkResult) -> None:
        request, sequence = work.request, work.sequence
        sequence.computed(work.num_tokens, result.logits, result.prompt_logprobs)
        self._lifecycle.count_missing(request)
        register_computed(sequence, self.blocks)
        if sequence.is_complete:
            self.planner.remove(sequence)
        else:
            self.planner.has_computed(sequence)
        self._lifecycle.release_merged(request)
        if not request.is_complete:
            self._send_computed(request)

    def _end_prompts(self, requests: Sequence[LanguageRequest]) -> None:
        """`requests`: those with a prompt in the step, unless they have ended."""
        ended_at = self._clock.now()
        for request in requests:
            if not request.is_complete:
                self._intake.note_waiting(request, ended_at)
        complete = [request for request in requests if request.is_complete]
        undrawn = [request for request in complete if not request.first_tokens]
        if undrawn:
            draw = self.runner.first_tokens
            for request, first in self._blame.together(undrawn, draw, _id_of, self._forward.probe):
                with self._blame.of(request.request_id):
                    self._on_prompt(request, first)
        for request in complete:
            if request not in undrawn:  # the sender of the KV has drawn the tokens, and told them
                request.drop_logits()
                with self._blame.of(request.request_id):
                    self._answers.begin(request)

    def _on_prompt(self, request: LanguageRequest, first: FirstTokens) -> None:
        """The prompts are computed, and the first tokens are drawn: they go out at once."""
        events = first.events(request, self._clock.now())
        for event in events:
            if request.sends or not request.choices[event.choice_idx].is_done:
                self._outbox.token(request.door, event)
        request.drop_logits()
        if not request.sends:
            request.drawn(first.token_ids)
            return self._answers.begin(request)
        self._computing.discard(request.request_id)
        request.move(LanguagePhase.SENDING)
        if any(event.finish_reason is None for event in events):
            request.drawn(first.token_ids)
            self._send_computed(request)
        # Otherwise the door's Cancel ends the request. If the lease were aborted here, decode's failure could
        # overtake these tokens.

    def _on_arrived(self, request: LanguageRequest, event: LeaseEvent | SendEvent) -> None:
        """The transfer of KV into the request's blocks has ended."""
        if request.is_closing:
            self._lifecycle.end(request)
        elif isinstance(event, Completed):
            request.arrived(msgspec.msgpack.decode(event.payload, type=KvReady))
            for sequence in request.sequences:
                register_computed(sequence, self.blocks)
            if request.is_complete:
                self._answers.begin(request)
            else:
                self._intake.compute(request)
        else:
            why = event.reason if isinstance(event, Aborted) else "its lease ran out"
            self._lifecycle.fail(request, UnavailableError(f"the prompt's KV cache did not arrive: {why}"))

    def _on_target(self, request: LanguageRequest, error: Exception | None) -> None:
        if error is None:
            return self._send_computed(request)
        if isinstance(error, TransferError):
            error = UnavailableError(f"cannot write to the decode worker: {error}")
        raise error

    def _on_item(self, request_id: str, item_idx: int, at: float) -> None:
        """The item's embeddings have arrived. If the request is unknown, `start` has not run yet and will
        find them ready."""
        request = self.requests.get(request_id)
        if request is not None and request.sequences:
            request.main.items_arrived([item_idx])
            self.planner.has_more_ready(request.main)
            if request.phase is LanguagePhase.COMPUTING and not request.is_complete:
                self._intake.note_waiting(request, at)

    def _send_computed(self, request: LanguageRequest) -> None:
        try:
            if request.sends:
                send_computed(request, self.blocks.block_size)
        except TransferError as error:
            self._lifecycle.fail(request, UnavailableError(f"cannot write to the decode worker: {error}"))

    def _unschedule(self, request: LanguageRequest) -> None:
        self._computing.discard(request.request_id)
        for sequence in request.sequences:
            self.planner.remove(sequence)
        if request.phase is LanguagePhase.RUNNING:
            self._answers.running.remove(request)
