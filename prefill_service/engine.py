"""The prefill engine: owns every request of this worker and the KV block pool.

A step:
1. requests get blocks, in the order of admission; cached prefixes are reused;
2. one packed batch of chunks is computed, and its KV is posted to decode layer by layer;
3. the doors are told.

Runs on the worker's engine thread. Transfer events and messages of doors arrive as calls. An exception that a
request causes ends that request only (`Blame`). How requests end: `PrefillLifecycle`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from cluster.clock import Clock
from cluster.errors import RequestError, UnavailableError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import block_hashes
from cluster.model.language import LanguageModel
from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.types.messages import BlocksChanged, LoadReport, PrefillAdmitted, StartPrefill
from cluster.types.transfer import ReceivedGrant
from cluster.worker.blame import Blame
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.requests import RequestTable
from cluster.worker.speed import SpeedReporter
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import Completed, LateWrite, LeaseEvent, SendEvent
from kv_transfer.lease.transfer import BlockTransfer
from prefill_service.allotment import free_blocks, try_allocate_blocks
from prefill_service.features import FeatureStore
from prefill_service.first_tokens import first_events
from prefill_service.lifecycle import PrefillLifecycle
from prefill_service.runner import PrefillRunner, uncut_spans
from prefill_service.state import PrefillPhase, PrefillRequest, PromptSequence
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
        self._cpu_slots = cpu_slots
        self._requests: RequestTable[PrefillRequest] = RequestTable(clock)
        self._admission = PromptAdmission(policy, blocks.num_blocks)
        self._planner = StepPlanner(policy, budget, cpu_slots, model.num_layers)
        self._targets = Targets(transfer_engine, budget, model.kv_layout)
        self._running: set[str] = set()  # ids of requests whose prompts are being computed
        self._lifecycle = PrefillLifecycle(
            self._requests, blocks, features, self._targets, self._admission, outbox, self._unschedule
        )
        self._blame = Blame(self._lifecycle.fail_named)
        self._speed = SpeedReporter(
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
        for request_id in self._requests.deadlines.expired():
            self._blame.run(request_id, self._lifecycle.expire, request_id)
        self._admit()
        self._tell_doors(self.load())  # before the step: decode reserves blocks for what was admitted
        if not self._run_chunks():
            return self._requests.deadlines.wait_s()
        self._tell_doors()
        return 0

    def start(self, door: DoorId, message: StartPrefill, came_at: float) -> None:
        """`came_at`: when the message arrived. The engine may have been busy since then."""
        arrived_at = came_at - message.request.waited_s
        request = PrefillRequest(message.request, door, arrived_at, Stopwatch(came_at))
        self._requests.add(request)
        self._blame.run(request.request_id, self._enqueue, request, message.timeout_s)

    def offer_target(self, request_id: str, grant: ReceivedGrant) -> None:
        """Decode's grant has arrived. Any thread; `take_targets` must follow. If a step is computing this
        prompt, its KV is sent from the next layer on."""
        self._targets.offer(request_id, grant)

    def take_targets(self) -> None:
        for request, error in self._targets.take(self._requests):
            self._blame.run(request.request_id, self._on_target, request, error)

    def cancel(self, request_id: str) -> None:
        """Frees a request in any state. Unknown requests and requests that have ended are ignored."""
        self._blame.run(request_id, self._lifecycle.cancel, request_id)

    def drop_door(self, door: DoorId) -> None:
        # Newest first: otherwise the shared embeddings of a cancelled request would be granted to the next
        # one of the same door.
        for request_id in reversed(self._requests.of_door(door)):
            self.cancel(request_id)

    def on_transfer(self, event: LeaseEvent | LateWrite | SendEvent, at: float) -> None:
        """A lease on the feature memory, or a transfer to decode, has closed at the instant `at`. Called once
        for each of them."""
        if isinstance(event, LateWrite):
            return self._lifecycle.fail_harmed(event.block_ids)
        request = self._targets.by_lease.pop(event.lease_id, None)
        if request is not None:
            return self._blame.run(request.request_id, self._lifecycle.on_sent, request, event)
        has_come = isinstance(event, Completed)
        for request_id, item_idx in self._features.close_lease(event.lease_id, completed=has_come):
            self._blame.run(request_id, self._on_item, request_id, item_idx, at)

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=self._lifecycle.num_missing_tokens,
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free + self._features.num_used_blocks,
            num_open_leases=len(self._targets.by_lease) + self._features.num_open_leases,
            num_cached_blocks=self._blocks.num_cached,
            sent=self._transfer_engine.sent,
            received=self._transfer_engine.received,
            held_bytes=self._features.held_bytes,
        )

    def _tell_doors(self, load: LoadReport | None = None) -> None:
        changes = self._blocks.take_changes()
        if changes is not None:
            self._outbox.broadcast(changes)
        self._speed.report()
        self._outbox.flush(load)

    def _enqueue(self, request: PrefillRequest, timeout_s: float) -> None:
        asked, request_id, block_size = request.request, request.request_id, self._blocks.block_size
        for i, prompt in enumerate(asked.prompts):
            positions, hashes = self._model.positions(prompt), block_hashes(prompt, block_size)
            request.sequences.append(PromptSequence(f"{request_id}/{i}", prompt, positions, hashes))
        request.stopwatch.turn_to(Part.BLOCKS, self._clock.now())
        request.main.items_ready = self._features.ready_items(request_id, len(asked.prompt.media))
        self._lifecycle.count_missing(request)
        if asked.num_prompt_blocks(block_size) > self._blocks.num_blocks:
            capacity = self._blocks.num_blocks * block_size
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; a prefill worker holds {capacity}"
            )
        self._requests.deadlines.add(request_id, timeout_s)
        self._admission.push(self._ticket(request, request_id, request.num_prompt_tokens))

    def _on_target(self, request: PrefillRequest, error: Exception | None) -> None:
        if error is None:
            return self._send_computed(request)
        if isinstance(error, TransferError):
            error = UnavailableError(f"cannot write to the decode worker: {error}")
        raise error

    def _on_item(self, request_id: str, item_idx: int, at: float) -> None:
        """The item's embeddings have arrived. If the request is unknown, `start` has not run yet and will
        find them ready."""
        request = self._requests.get(request_id)
        if request is not None:
            request.main.items_ready.add(item_idx)
            self._planner.has_more_ready(request.main)
            if request.phase is PrefillPhase.RUNNING and not request.is_complete:
                self._note_waiting(request, at)

    def _note_waiting(self, request: PrefillRequest, at: float) -> None:
        """The request is in no step. From now on its time counts as waiting for the device or, if no token
        can run, for embeddings."""
        request.stopwatch.turn_to(Part.QUEUED if self._planner.can_run(request) else Part.MEDIA, at)

    def _ticket(self, request: PrefillRequest, name: str, num_tokens: int) -> Ticket:
        is_text = not request.main.prompt.media
        return Ticket(name, request.arrived_at, num_tokens, is_text, request.request.priority)

    def _admit(self) -> None:
        """Blocks for the next requests. A request that waits for embeddings holds its blocks and delays no
        other request."""
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
        request.move(PrefillPhase.RUNNING)
        self._running.add(request.request_id)
        self._lifecycle.count_missing(request)
        self._outbox.send(request.door, PrefillAdmitted(request.request_id))
        for sequence, uncut in zip(request.sequences, spans, strict=True):
            sequence.num_missing_at_start = sequence.num_tokens - sequence.num_computed_tokens
            part = self._ticket(request, sequence.sequence_id, sequence.num_missing_at_start)
            self._planner.add(request, sequence, part, uncut)
        self._note_waiting(request, self._clock.now())
        self._release_merged(request)
        return True

    def _run_chunks(self) -> bool:
        """One forward over what the scheduler chooses. False: nothing can run."""
        batch, is_long = self._planner.next_step()
        if not batch:
            return False
        requests = dict.fromkeys(request for request, _, _ in batch)
        # A step with a short prompt keeps its CPU slot: its first token is worth the pause of other workers.
        with self._cpu_slots.acquire(0.0 if is_long else math.inf):
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
        """`requests`: those of the step that have not ended."""
        ended_at = self._clock.now()
        for request in requests:
            if not request.is_complete:
                self._note_waiting(request, ended_at)
        if complete := [request for request in requests if request.is_complete]:
            draw = self._runner.first_tokens
            for request, tokens in self._blame.together(complete, draw, _id_of, self._probe):
                self._blame.run(request.request_id, self._tell_first_tokens, request, tokens)

    def _probe(self) -> None:
        """Raises if the device is broken: computes one token that belongs to no request. Without a free
        block, the device counts as working."""
        block = self._blocks.try_allocate(1)
        if block is not None:
            self._runner.warm_up(1, block)
            self._blocks.free(block)

    def _run(self, batch: Sequence[StepWork]) -> list[Tensor | None]:
        """The forward. After each layer, its KV is posted to decode and the CPU slot may be yielded."""
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
        self._lifecycle.count_missing(request)
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
        """Releases items whose embeddings no further step reads."""
        for item_idx, item in enumerate(request.main.prompt.media):
            if item.end <= request.main.num_computed_tokens:
                self._features.release((request.request_id, item_idx))

    def _tell_first_tokens(self, request: PrefillRequest, token_ids: tuple[int, ...]) -> None:
        """The prompts are computed. The first tokens go out at once. The KV follows, unless the first tokens
        end every choice."""
        events = first_events(request, token_ids, self._clock.now())
        for event in events:
            self._outbox.token(request.door, event)
        self._running.remove(request.request_id)
        request.move(PrefillPhase.SENDING)
        for sequence in request.sequences:
            sequence.last_logits = None
        if any(event.finish_reason is None for event in events):
            request.first_tokens = token_ids
            self._send_computed(request)
        # Otherwise the door's Cancel ends the request. If the lease were aborted here, decode's failure could
        # overtake these tokens.

    def _send_computed(self, request: PrefillRequest) -> None:
        try:
            send_computed(request, self._blocks.block_size)
        except TransferError as error:
            message = f"cannot write to the decode worker: {error}"
            self._lifecycle.fail(request, UnavailableError(message))

    def _unschedule(self, request: PrefillRequest) -> None:
        self._running.discard(request.request_id)
        for sequence in request.sequences:
            self._planner.remove(sequence)


def _id_of_work(work: StepWork) -> str:
    return work[0].request_id
