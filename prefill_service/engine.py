"""The prefill engine: owns every request of this worker and the KV block pool.

A step: give blocks to whoever can have them (reusing cached prefixes), run one packed batch of chunks, post what was
computed to decode, tell the doors. Runs on the worker's engine thread; transfer events and door messages arrive as calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from cluster.clock import Clock
from cluster.errors import ClusterError, RequestError, UnavailableError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import block_hashes
from cluster.model.language import LanguageModel
from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.chunks import Chunk, ChunkScheduler
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.types.messages import (
    Admitted,
    BlocksChanged,
    Failed,
    FinishReason,
    LoadReport,
    StartPrefill,
    TokenEvent,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from cluster.types.transfer import Grant
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.speed import Speed
from cluster.worker.turns import Turns
from kv_transfer.agent import TransferError
from kv_transfer.group import GroupMover
from kv_transfer.mover import Mover
from kv_transfer.receiver import Completed, LeaseEvent
from kv_transfer.sender import Finished, SendEvent
from prefill_service.allotment import take_blocks, try_give_blocks
from prefill_service.features import FeatureStore
from prefill_service.runner import PrefillRunner, uncut_spans
from prefill_service.state import Phase, PrefillRequest, PromptSequence
from prefill_service.timing import Part, Stopwatch
from prefill_service.transfer import Ready, StepPush, StepWork, Targets, send_computed

Work = tuple[PrefillRequest, PromptSequence]


class PrefillEngine:
    def __init__(
        self,
        model: LanguageModel,
        runner: PrefillRunner,
        blocks: BlockPool,
        features: FeatureStore,
        mover: Mover | GroupMover,
        outbox: Outbox,
        clock: Clock,
        policy: SchedulingPolicy,
        budget: StepBudget,
        turns: Turns,
    ):
        self._model = model
        self._runner = runner
        self._blocks = blocks
        self._features = features
        self._mover = mover
        self._outbox = outbox
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._budget = budget
        self._turns = turns
        self._requests: dict[str, PrefillRequest] = {}
        self._admission = PromptAdmission(policy, blocks.num_blocks)
        self._chunks = ChunkScheduler(policy)
        self._sequences: dict[str, Work] = {}  # what the chunk scheduler chooses from, by sequence id
        self._targets = Targets(mover, budget, model.kv_layout)
        self._running: set[str] = set()
        self._num_missing_tokens = 0  # of all requests
        self._long_step_s = 0.0  # that a step of long prompts may last
        self._context = 0.0  # computed tokens that a token of the last step saw, on average
        self._speed = Speed(
            outbox,
            clock,
            prefill=budget.fit,
            max_step_units=budget.most_tokens,
            links=lambda: mover.links,
            codecs=mover.codecs,
        )
        blocks.watch()
        outbox.greet_with(lambda: BlocksChanged(blocks.content(), ()))

    def step(self) -> float | None:
        for request_id in self._deadlines.expired():
            self._expire(request_id)
        self._admit()
        self._tell_doors(self.load())  # before the step: decode reserves blocks for what was admitted
        if not self._run_chunks():
            return self._deadlines.wait_s()
        self._tell_doors()
        return 0

    def start(self, door: DoorId, message: StartPrefill, came_at: float) -> None:
        """`came_at`: when the message was here, however long the engine was busy since."""
        request_id = message.request.request_id
        try:
            sequences = self._make_sequences(message.request)
        except ClusterError as error:  # a prompt that this family cannot place
            self._release_features(message.request)
            return self._outbox.send(door, Failed(request_id, to_info(error)))
        arrived_at = came_at - message.request.waited_s
        request = PrefillRequest(message.request, door, arrived_at, sequences, Stopwatch(came_at))
        request.stopwatch.turn_to(Part.BLOCKS, self._clock.now())
        request.main.items_ready = self._features.ready_items(request_id, len(message.request.prompt.media))
        self._requests[request_id] = request
        self._num_missing_tokens += request.num_missing_tokens
        if message.request.num_prompt_blocks(self._blocks.block_size) > self._blocks.num_blocks:
            capacity = self._blocks.num_blocks * self._blocks.block_size
            error = RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; a prefill worker holds {capacity}"
            )
            return self._fail(request, error)
        self._deadlines.add(request_id, message.timeout_s)
        self._admission.push(self._ticket(request, request_id, request.num_prompt_tokens))

    def offer_target(self, request_id: str, grant: Grant) -> None:
        """Decode's grant has come. Any thread; `take_targets` must follow. A step that computes this very prompt takes it up at its
        next layer."""
        self._targets.offer(request_id, grant)

    def take_targets(self) -> None:
        for request, error in self._targets.take(self._requests):
            if error is None:
                self._send_computed(request)
            else:
                self._fail(request, UnavailableError(f"cannot write to the decode worker: {error}"))

    def cancel(self, request_id: str) -> None:
        """Free a request in whatever state it is. Unknown and ended requests are ignored."""
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.CLOSING:
            return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self._let_go(request, "cancelled")

    def drop_door(self, door: DoorId) -> None:
        for request_id in [r.request_id for r in self._requests.values() if r.door == door][::-1]:
            self.cancel(request_id)  # newest first: nobody's features are handed on to the next of them

    def on_transfer(self, event: LeaseEvent | SendEvent, at: float) -> None:
        """A lease on our features, or a transfer of ours, has closed. Exactly once each. `at`: when it did."""
        request = self._targets.by_lease.pop(event.lease_id, None)
        if request is not None:
            return self._on_sent(request, event)
        has_come = isinstance(event, Completed)
        for request_id, item_idx in self._features.close_lease(event.lease_id, completed=has_come):
            request = self._requests.get(request_id)  # None: `start` will find it ready
            if request is not None:
                request.main.items_ready.add(item_idx)
                if request.main.sequence_id in self._chunks:
                    self._chunks.set_ready(request.main.sequence_id, request.main.num_ready_tokens)
                    self._note_waiting(request, at)

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=self._num_missing_tokens,
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free + self._features.num_used_blocks,
            num_open_leases=len(self._targets.by_lease) + self._features.num_open_leases,
            num_cached_blocks=self._blocks.num_cached,
            sent=self._mover.sent,
            held_bytes=self._features.held_bytes,
        )

    def _tell_doors(self, load: LoadReport | None = None) -> None:
        changes = self._blocks.take_changes()
        if changes is not None:
            self._outbox.broadcast(changes)
        self._speed.tell()
        self._outbox.flush(load)

    def _note_waiting(self, request: PrefillRequest, at: float) -> None:
        """It is in no step: does it wait for the device, or for embeddings?"""
        can_run = any(self._chunks.is_runnable(sequence.sequence_id) for sequence in request.sequences)
        request.stopwatch.turn_to(Part.QUEUED if can_run else Part.MEDIA, at)

    def _make_sequences(self, request: GenerateRequest) -> list[PromptSequence]:
        sequences = []
        for i, prompt in enumerate(request.prompts):
            positions, hashes = self._model.positions(prompt), block_hashes(prompt, self._blocks.block_size)
            sequences.append(PromptSequence(f"{request.request_id}/{i}", prompt, positions, hashes))
        return sequences

    def _ticket(self, request: PrefillRequest, name: str, num_tokens: int) -> Ticket:
        is_text = not request.main.prompt.media
        return Ticket(name, request.arrived_at, num_tokens, is_text, request.request.priority)

    def _admit(self) -> None:
        """Blocks for whoever is next. A request that waits for embeddings holds its blocks, and stops nobody else."""
        while any(self._try_admit(ticket) for ticket in self._admission.heads()):
            pass

    def _try_admit(self, ticket: Ticket) -> bool:
        request = self._requests[ticket.request_id]
        num_blocks = request.request.num_prompt_blocks(self._blocks.block_size)
        if not self._admission.has_share(ticket, num_blocks):
            return False
        spans = [uncut_spans(self._model, sequence.prompt) for sequence in request.sequences]
        wants = zip(request.sequences, spans, strict=True)
        if not all(try_give_blocks(self._blocks, *want) for want in wants):
            take_blocks(self._blocks, request.sequences)
            return False
        self._admission.admit(ticket, num_blocks)
        request.move(Phase.RUNNING)
        self._running.add(request.request_id)
        self._num_missing_tokens -= sum(s.num_cached_tokens for s in request.sequences)
        self._outbox.send(request.door, Admitted(request.request_id))
        for sequence in request.sequences:
            self._put_to_work(request, sequence)
        self._note_waiting(request, self._clock.now())
        self._release_merged(request)
        return True

    def _put_to_work(self, request: PrefillRequest, sequence: PromptSequence) -> None:
        sequence.num_missing_at_start = sequence.num_tokens - sequence.num_computed_tokens
        ticket = self._ticket(request, sequence.sequence_id, sequence.num_missing_at_start)
        spans = uncut_spans(self._model, sequence.prompt)
        self._chunks.add(ticket, sequence.num_tokens, spans)
        self._chunks.set_computed(sequence.sequence_id, sequence.num_computed_tokens)
        self._chunks.set_ready(sequence.sequence_id, sequence.num_ready_tokens)
        self._sequences[sequence.sequence_id] = (request, sequence)

    def _run_chunks(self) -> bool:
        """One forward over what the scheduler chooses; False: nothing can run."""
        chunks, is_long = self._schedule()
        if not chunks:
            return False
        batch = [(*self._sequences[chunk.request_id], chunk.num_scheduled_tokens) for chunk in chunks]
        requests = dict.fromkeys(request for request, _, _ in batch)
        with self._turns.hold(0.0 if is_long else math.inf):  # a short prompt is worth a pause of the others
            began_at = self._clock.now()
            for request in requests:
                request.stopwatch.turn_to(Part.COMPUTING, began_at)
            logits = self._run(batch)
        if is_long:
            self._long_step_s = self._model.num_layers * self._turns.stretch_s
        num_tokens = sum(count for _, _, count in batch)
        self._context = sum(sequence.num_computed_tokens * count for _, sequence, count in batch) / num_tokens
        self._budget.observe(num_tokens, self._context, self._turns.ran_s)
        for (request, sequence, count), row in zip(batch, logits, strict=True):
            self._advance(request, sequence, count, row)
        ended_at = self._clock.now()
        complete = [request for request in requests if request.is_complete]
        for request in requests.keys() - complete:
            self._note_waiting(request, ended_at)
        if complete:
            for request, tokens in zip(complete, self._runner.first_tokens(complete), strict=True):
                self._tell_first_tokens(request, tokens)
        return True

    def _schedule(self) -> tuple[list[Chunk], bool]:
        """The next step, and whether it serves only prompts longer than the largest step. Such a step gives way between layers, so
        each is to last no longer than its turn. A long prompt's first step is as small as can be: it shows how long that is."""
        chunks = self._chunks.schedule(self._budget.max_tokens(self._context))
        sequences = [self._sequences[chunk.request_id][1] for chunk in chunks]
        if any(sequence.num_missing_at_start <= self._budget.most_tokens for sequence in sequences):
            return chunks, False
        is_first = any(sequence.num_computed_tokens == sequence.num_cached_tokens for sequence in sequences)
        most_s = 0.0 if is_first else self._long_step_s
        return self._chunks.schedule(self._budget.max_tokens(self._context, most_s)), True

    def _run(self, batch: Sequence[StepWork]) -> list[Tensor | None]:
        """The forward; meanwhile its KV goes out and others get their turns, layer by layer."""
        push = StepPush(batch, self._model.kv_layout, self._model.num_layers)
        in_step = {request.request_id: request for request, _, _ in batch}

        def on_layer(layer_idx: int, ready: Ready) -> None:
            self._targets.take_early(in_step)
            push.on_layer(layer_idx, ready)
            self._turns.offer()

        logits = self._runner.run(batch, on_layer)
        push.close()
        return logits

    def _advance(
        self, request: PrefillRequest, sequence: PromptSequence, count: int, logits: Tensor | None
    ) -> None:
        block_size = self._blocks.block_size
        first_new = sequence.num_computed_tokens // block_size
        sequence.num_computed_tokens += count
        self._num_missing_tokens -= count
        for i in range(first_new, sequence.num_computed_tokens // block_size):
            self._blocks.register(sequence.block_table[i], sequence.block_hashes[i])
        if sequence.is_complete:
            sequence.last_logits = logits
            self._leave_work(sequence)
        else:
            self._chunks.set_computed(sequence.sequence_id, sequence.num_computed_tokens)
        self._release_merged(request)
        if not request.is_complete:
            self._send_computed(request)

    def _leave_work(self, sequence: PromptSequence) -> None:
        self._chunks.remove(sequence.sequence_id)
        self._sequences.pop(sequence.sequence_id, None)

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
        stop = request.request.stop
        has_more = False
        for choice_idx, token_id in enumerate(token_ids):
            finish_reason = None
            if token_id in stop.stop_token_ids:
                finish_reason = FinishReason.STOP
            elif stop.max_tokens == 1:
                finish_reason = FinishReason.LENGTH
            has_more |= finish_reason is None
            num_cached = request.main.num_cached_tokens
            timing = request.stopwatch.timing(self._clock.now()) if choice_idx == 0 else None
            event = TokenEvent(request.request_id, (token_id,), finish_reason, num_cached, choice_idx, timing)
            self._outbox.token(request.door, event)
        self._running.remove(request.request_id)
        request.move(Phase.SENDING)
        for sequence in request.sequences:
            sequence.last_logits = None
        if has_more:
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

    def _fail(self, request: PrefillRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self._let_go(request, error.message)

    def _let_go(self, request: PrefillRequest, reason: str) -> None:
        """Nobody wants the request any more. Blocks that a posted write still reads wait for its end."""
        self._release_features(request.request)
        self._leave(request)
        if request.outgoing is not None and request.outgoing.lease_id in self._targets.by_lease:
            request.move(Phase.CLOSING)
            request.outgoing.abort(reason)
        else:
            self._end(request)

    def _end(self, request: PrefillRequest) -> None:
        self._release_features(request.request)
        self._leave(request)
        for sequence in request.sequences:
            self._blocks.free(sequence.block_table)
        self._num_missing_tokens -= request.num_missing_tokens
        self._admission.remove(request.request_id)
        del self._requests[request.request_id]

    def _leave(self, request: PrefillRequest) -> None:
        """Out of work; repeating it is harmless."""
        self._running.discard(request.request_id)
        for sequence in request.sequences:
            self._leave_work(sequence)
