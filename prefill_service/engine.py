"""The prefill engine: owns every request of this worker and the KV block pool.

A step: give blocks to whoever can have them (reusing cached prefixes), run one packed batch of chunks, post what was
computed to decode, tell the doors. Runs on the worker's engine thread; transfer events and door messages arrive as calls. What a
request makes raise costs that request: see `Blame`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from cluster.clock import Clock
from cluster.errors import ClusterError, RequestError, UnavailableError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import block_hashes
from cluster.model.language import LanguageModel
from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.types.messages import (
    BlocksChanged,
    Failed,
    FinishReason,
    LoadReport,
    PrefillAdmitted,
    StartPrefill,
    TokenEvent,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from cluster.types.transfer import ReceivedGrant
from cluster.worker.blame import Blame, bookkeeping
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.speed import Speed
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import Completed, Finished, LateWrite, LeaseEvent, SendEvent
from kv_transfer.lease.transfer import BlockTransfer
from prefill_service.allotment import free_blocks, try_allocate_blocks
from prefill_service.features import FeatureStore
from prefill_service.first_tokens import first_events
from prefill_service.late_writes import fail_harmed
from prefill_service.runner import PrefillRunner, uncut_spans
from prefill_service.state import Phase, PrefillRequest, PromptSequence
from prefill_service.steps import StepPlanner
from prefill_service.timing import Part, Stopwatch
from prefill_service.transfer import Ready, StepPush, StepWork, Targets, send_computed

_id_of = attrgetter("request_id")


class PrefillEngine:
    def __init__(
        self,
        model: LanguageModel,
        runner: PrefillRunner,
        blocks: BlockPool,
        features: FeatureStore,
        transfer_engine: BlockTransfer,
        outbox: Outbox,
        clock: Clock,
        policy: SchedulingPolicy,
        budget: StepBudget,
        cpu_slots: CpuSlots,
    ):
        self._model = model
        self._runner = runner
        self._blocks = blocks
        self._features = features
        self._transfer_engine = transfer_engine
        self._outbox = outbox
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._cpu_slots = cpu_slots
        self._blame = Blame(self._fail_named)
        self._requests: dict[str, PrefillRequest] = {}
        self._admission = PromptAdmission(policy, blocks.num_blocks)
        self._planner = StepPlanner(policy, budget, cpu_slots, model.num_layers)
        self._targets = Targets(transfer_engine, budget, model.kv_layout)
        self._running: set[str] = set()
        self._num_missing_tokens = 0  # of all requests
        self._speed = Speed(
            outbox,
            clock,
            prefill=budget.fit,
            max_step_units=budget.max_step_tokens,
            links=lambda: transfer_engine.links,
            codecs=transfer_engine.codecs,
        )
        blocks.watch()
        outbox.greet_with(lambda: BlocksChanged(blocks.content(), ()))

    def step(self) -> float | None:
        for request_id in self._deadlines.expired():
            self._blame.run(request_id, self._expire, request_id)
        self._admit()
        self._tell_doors(self.load())  # before the step: decode reserves blocks for what was admitted
        if not self._run_chunks():
            return self._deadlines.wait_s()
        self._tell_doors()
        return 0

    def start(self, door: DoorId, message: StartPrefill, came_at: float) -> None:
        """`came_at`: when the message was here, however long the engine was busy since."""
        request = PrefillRequest(
            message.request, door, came_at - message.request.waited_s, Stopwatch(came_at)
        )
        self._requests[request.request_id] = request
        self._blame.run(request.request_id, self._take_in, request, message.timeout_s)

    def offer_target(self, request_id: str, grant: ReceivedGrant) -> None:
        """Decode's grant has come. Any thread; `take_targets` must follow. A step that computes this very prompt takes it up at its
        next layer."""
        self._targets.offer(request_id, grant)

    def take_targets(self) -> None:
        for request, error in self._targets.take(self._requests):
            self._blame.run(request.request_id, self._on_target, request, error)

    def cancel(self, request_id: str) -> None:
        """Free a request in whatever state it is. Unknown and ended requests are ignored."""
        self._blame.run(request_id, self._cancel, request_id)

    def drop_door(self, door: DoorId) -> None:
        for request_id in [r.request_id for r in self._requests.values() if r.door == door][::-1]:
            self.cancel(request_id)  # newest first: nobody's features are handed on to the next of them

    def on_transfer(self, event: LeaseEvent | LateWrite | SendEvent, at: float) -> None:
        """A lease on our features, or a transfer of ours, has closed. Exactly once each. `at`: when it did."""
        if isinstance(event, LateWrite):
            return fail_harmed(event.block_ids, self._features, self._blocks, self._requests, self._fail)
        request = self._targets.by_lease.pop(event.lease_id, None)
        if request is not None:
            return self._blame.run(request.request_id, self._on_sent, request, event)
        has_come = isinstance(event, Completed)
        for request_id, item_idx in self._features.close_lease(event.lease_id, completed=has_come):
            self._blame.run(request_id, self._on_item, request_id, item_idx, at)

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=self._num_missing_tokens,
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free + self._features.num_used_blocks,
            num_open_leases=len(self._targets.by_lease) + self._features.num_open_leases,
            num_cached_blocks=self._blocks.num_cached,
            sent=self._transfer_engine.sent,
            held_bytes=self._features.held_bytes,
        )

    def _tell_doors(self, load: LoadReport | None = None) -> None:
        changes = self._blocks.take_changes()
        if changes is not None:
            self._outbox.broadcast(changes)
        self._speed.tell()
        self._outbox.flush(load)

    def _take_in(self, request: PrefillRequest, timeout_s: float) -> None:
        asked, request_id, block_size = request.request, request.request_id, self._blocks.block_size
        for i, prompt in enumerate(asked.prompts):
            positions, hashes = self._model.positions(prompt), block_hashes(prompt, block_size)
            request.sequences.append(PromptSequence(f"{request_id}/{i}", prompt, positions, hashes))
        request.stopwatch.turn_to(Part.BLOCKS, self._clock.now())
        request.main.items_ready = self._features.ready_items(request_id, len(asked.prompt.media))
        self._count_missing(request)
        if asked.num_prompt_blocks(block_size) > self._blocks.num_blocks:
            capacity = self._blocks.num_blocks * block_size
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; a prefill worker holds {capacity}"
            )
        self._deadlines.add(request_id, timeout_s)
        self._admission.push(self._ticket(request, request_id, request.num_prompt_tokens))

    def _cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.CLOSING:
            return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self._let_go(request, "cancelled")

    def _on_target(self, request: PrefillRequest, error: Exception | None) -> None:
        if error is None:
            return self._send_computed(request)
        if isinstance(error, TransferError):
            error = UnavailableError(f"cannot write to the decode worker: {error}")
        raise error

    def _on_item(self, request_id: str, item_idx: int, at: float) -> None:
        """Its embeddings are here."""
        request = self._requests.get(request_id)  # None: `start` will find them ready
        if request is not None:
            request.main.items_ready.add(item_idx)
            self._planner.has_more_ready(request.main)
            if request.phase is Phase.RUNNING and not request.is_complete:
                self._note_waiting(request, at)

    def _count_missing(self, request: PrefillRequest) -> None:
        self._num_missing_tokens += request.num_missing_tokens - request.num_counted_tokens
        request.num_counted_tokens = request.num_missing_tokens

    def _note_waiting(self, request: PrefillRequest, at: float) -> None:
        """It is in no step: does it wait for the device, or for embeddings?"""
        request.stopwatch.turn_to(Part.QUEUED if self._planner.can_run(request) else Part.MEDIA, at)

    def _ticket(self, request: PrefillRequest, name: str, num_tokens: int) -> Ticket:
        is_text = not request.main.prompt.media
        return Ticket(name, request.arrived_at, num_tokens, is_text, request.request.priority)

    def _admit(self) -> None:
        """Blocks for whoever is next. A request that waits for embeddings holds its blocks, and stops nobody else."""
        while any(
            self._blame.run(ticket.request_id, self._try_admit, ticket) is not False
            for ticket in self._admission.heads()
        ):
            pass

    def _try_admit(self, ticket: Ticket) -> bool:
        request = self._requests[ticket.request_id]
        num_blocks = request.request.num_prompt_blocks(self._blocks.block_size)
        if not self._admission.has_share(ticket, num_blocks):
            return False
        spans = [uncut_spans(self._model, sequence.prompt) for sequence in request.sequences]
        wants = zip(request.sequences, spans, strict=True)
        if not all(try_allocate_blocks(self._blocks, *want) for want in wants):
            free_blocks(self._blocks, request.sequences)
            return False
        self._admission.admit(ticket, num_blocks)
        request.move(Phase.RUNNING)
        self._running.add(request.request_id)
        self._count_missing(request)
        self._outbox.send(request.door, PrefillAdmitted(request.request_id))
        for sequence, uncut in zip(request.sequences, spans, strict=True):
            sequence.num_missing_at_start = sequence.num_tokens - sequence.num_computed_tokens
            part = self._ticket(request, sequence.sequence_id, sequence.num_missing_at_start)
            self._planner.add(request, sequence, part, uncut)
        self._note_waiting(request, self._clock.now())
        self._release_merged(request)
        return True

    def _run_chunks(self) -> bool:
        """One forward over what the scheduler chooses; False: nothing can run."""
        batch, is_long = self._planner.next_step()
        if not batch:
            return False
        requests = dict.fromkeys(request for request, _, _ in batch)
        with self._cpu_slots.acquire(
            0.0 if is_long else math.inf
        ):  # a short prompt is worth a pause of the others
            began_at = self._clock.now()
            for request in requests:
                request.stopwatch.turn_to(Part.COMPUTING, began_at)
            done = self._blame.together(batch, self._run, _id_of_work, self._probe)
        if done:
            self._planner.observe([work for work, _ in done], is_long)
        for (request, sequence, count), row in done:
            if request.request_id in self._running:
                self._blame.run(request.request_id, self._advance, request, sequence, count, row)
        self._end_step([request for request in requests if request.request_id in self._running])
        return True

    def _end_step(self, requests: Sequence[PrefillRequest]) -> None:
        """Those of a step that go on."""
        ended_at = self._clock.now()
        for request in requests:
            if not request.is_complete:
                self._note_waiting(request, ended_at)
        if complete := [request for request in requests if request.is_complete]:
            draw = self._runner.first_tokens
            for request, tokens in self._blame.together(complete, draw, _id_of, self._probe):
                self._blame.run(request.request_id, self._tell_first_tokens, request, tokens)

    def _probe(self) -> None:
        """Whether the device still works: one token that belongs to no request. Without a free block for it, the answer is yes."""
        block = self._blocks.try_allocate(1)
        if block is not None:
            self._runner.warm_up(1, block)
            self._blocks.free(block)

    def _run(self, batch: Sequence[StepWork]) -> list[Tensor | None]:
        """The forward; meanwhile its KV goes out and others get their cpu_slots, layer by layer."""
        push = StepPush(batch, self._model.kv_layout, self._model.num_layers)
        in_step = {request.request_id: request for request, _, _ in batch}

        def on_layer(layer_idx: int, ready: Ready) -> None:
            self._targets.take_early(in_step)
            push.on_layer(layer_idx, ready)
            self._cpu_slots.yield_between_layers()

        logits = self._runner.run(batch, on_layer)
        push.close()
        return logits

    def _advance(
        self, request: PrefillRequest, sequence: PromptSequence, count: int, logits: Tensor | None
    ) -> None:
        block_size = self._blocks.block_size
        first_new = sequence.num_computed_tokens // block_size
        sequence.num_computed_tokens += count
        self._count_missing(request)
        for i in range(first_new, sequence.num_computed_tokens // block_size):
            self._blocks.register(sequence.block_table[i], sequence.block_hashes[i])
        if sequence.is_complete:
            sequence.last_logits = logits
            self._planner.remove(sequence)
        else:
            self._planner.has_computed(sequence)
        self._release_merged(request)
        if not request.is_complete:
            self._send_computed(request)

    def _release_merged(self, request: PrefillRequest) -> None:
        for item_idx, item in enumerate(request.main.prompt.media):
            if item.end <= request.main.num_computed_tokens:
                self._features.release((request.request_id, item_idx))

    def _release_features(self, request: GenerateRequest) -> None:
        """The request is over. Items that are gone already are ignored."""
        for item_idx in range(len(request.prompt.media)):
            self._features.release((request.request_id, item_idx), has_ended=True)

    def _tell_first_tokens(self, request: PrefillRequest, token_ids: tuple[int, ...]) -> None:
        """The prompts are computed. The tokens go out at once; KV follows, unless they already end every choice."""
        events = first_events(request, token_ids, self._clock.now())
        for event in events:
            self._outbox.token(request.door, event)
        self._running.remove(request.request_id)
        request.move(Phase.SENDING)
        for sequence in request.sequences:
            sequence.last_logits = None
        if any(event.finish_reason is None for event in events):
            request.first_tokens = token_ids
            self._send_computed(request)
        # Else the door's Cancel ends the request: were the lease aborted now, decode's failure could overtake these tokens.

    def _send_computed(self, request: PrefillRequest) -> None:
        try:
            send_computed(request, self._blocks.block_size)
        except TransferError as error:
            self._fail(request, UnavailableError(f"cannot write to the decode worker: {error}"))

    def _on_sent(self, request: PrefillRequest, event: LeaseEvent | SendEvent) -> None:
        if request.phase is Phase.CLOSING or isinstance(event, Finished):
            self._end(request)
        else:
            self._fail(request, UnavailableError(f"the KV cache could not be sent to decode: {event}"))

    def _expire(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.CLOSING:
            return
        waited_for = {
            Phase.WAITING: "free KV blocks",
            Phase.RUNNING: "embeddings or its turn",
            Phase.SENDING: "the decode worker",
        }[request.phase]
        self._fail(request, UnavailableError(f"prefill waited too long for {waited_for}"))

    def _fail_named(self, request_id: str, error: ClusterError) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.CLOSING:
            self._fail(request, error)

    def _fail(self, request: PrefillRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self._let_go(request, error.message)

    @bookkeeping
    def _let_go(self, request: PrefillRequest, reason: str) -> None:
        """Nobody wants the request any more. Blocks that a posted write still reads wait for its end."""
        self._release_features(request.request)
        self._leave(request)
        if request.outgoing is not None and request.outgoing.lease_id in self._targets.by_lease:
            request.move(Phase.CLOSING)
            request.outgoing.abort(reason)
        else:
            self._end(request)

    @bookkeeping
    def _end(self, request: PrefillRequest) -> None:
        self._release_features(request.request)
        self._leave(request)
        for sequence in request.sequences:
            self._blocks.free(sequence.block_table)
        self._num_missing_tokens -= request.num_counted_tokens
        self._admission.remove(request.request_id)
        del self._requests[request.request_id]

    def _leave(self, request: PrefillRequest) -> None:
        """Out of work; repeating it is harmless."""
        self._running.discard(request.request_id)
        for sequence in request.sequences:
            self._planner.remove(sequence)


def _id_of_work(work: StepWork) -> str:
    return work[0].request_id
