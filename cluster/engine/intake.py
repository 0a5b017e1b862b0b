"""From a door's message to blocks: how requests enter the engine.

A request gets blocks for all its prompts at once, in the order of admission. Then its prompts are computed
here, or its blocks are leased to the worker that computes them. One block is left for every sequence of an
answer that has blocks already: without it, a request could be preempted as soon as it is admitted. A request
that waits for embeddings holds its blocks and delays no other request.

A request with media has its place in the order from its arrival on, also while it waits for its grammar or
for a prefix from the second tier. It holds room for embeddings meanwhile. A younger request that got blocks
before it could wait for that room, and keep it from its blocks.

Used on the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import Clock
from cluster.engine.lifecycle import EngineState, Lifecycle
from cluster.engine.limits import StepLimits
from cluster.engine.planner import PromptPlanner
from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguagePhase, LanguageRequest
from cluster.engine.tables import try_allocate_prompts, uncut_spans
from cluster.engine.timing import Part, Stopwatch
from cluster.errors import ClusterError, InternalError, RequestError, UnavailableError
from cluster.kvcache.hashing import BlockHashes
from cluster.model.language import LanguageModel
from cluster.scheduling.admission import heads
from cluster.scheduling.keys import Ticket
from cluster.types.messages import DecodeGranted, PrefillAdmitted, StartDecode, StartPrefill
from cluster.worker.blame import Blame
from cluster.worker.outbox import DoorId, Outbox


@dataclass(eq=False)
class Intake:
    _model: LanguageModel
    _state: EngineState
    _limits: StepLimits
    _planner: PromptPlanner
    _lifecycle: Lifecycle
    _blame: Blame
    _outbox: Outbox
    _clock: Clock

    def start(self, door: DoorId, message: StartPrefill | StartDecode, came_at: float) -> None:
        sends = isinstance(message, StartPrefill)
        request = LanguageRequest(
            message.request,
            door,
            message.timeout_s,
            came_at - message.request.waited_s,
            Stopwatch(came_at),
            computes=sends or message.prefills,
            sends=sends,
            codec="raw" if sends else message.codec,
        )
        self._state.requests.add(request)
        self._state.counts.start(request)
        with self._blame.of(request.request_id):
            self._enqueue(request)

    def admit(self) -> None:
        """Slots for adapters that wait for one, then blocks for the next requests."""
        if self._state.adapters is not None:
            self._state.adapters.settle(self._state.requests.values())
        while any(map(self._is_served, heads(self._state.admission, self._state.arrivals, self._may_send))):
            pass

    def _is_served(self, ticket: Ticket) -> bool:
        """Whether the request waits for blocks no more: it has them, or has failed."""
        with self._blame.of(ticket.request_id):
            return self._try_admit(ticket)
        return True

    def _may_send(self, request_id: str) -> bool:
        """Whether the request may hold blocks beside those of prompts that are sent to other workers. If this
        worker generates answers, these have no more than half of its blocks, unless there is only one: two
        workers that send each other prompts would otherwise wait for each other."""
        request, num_held = self._state.requests[request_id], self._state.counts.num_sending_blocks
        if not request.sends or self._limits.max_sequences == 0 or num_held == 0:
            return True
        return num_held + self._num_blocks(request) <= self._state.blocks.num_blocks // 2

    def compute(self, request: LanguageRequest) -> None:
        """The prompts of the request are computed from now on, as far as they are not here."""
        request.move(LanguagePhase.COMPUTING)
        self._state.computing.add(request.request_id)
        self._lifecycle.release_merged(request)  # room of items that are cached: the next item may need it
        self._lifecycle.count_missing(request)
        for item_idx, item in enumerate(request.main.prompt.media):
            if item.end > request.main.num_computed_tokens:
                self._state.features.want((request.request_id, item_idx))
        for sequence in request.sequences:
            if not sequence.is_complete:
                ticket = self._ticket(request, sequence.sequence_id, sequence.num_missing_tokens)
                self._planner.add(request, sequence, ticket, uncut_spans(self._model, sequence.prompt))
        self.note_waiting(request, self._clock.now())

    def note_waiting(self, request: LanguageRequest, at: float) -> None:
        """The request is in no step. From now on its time counts as waiting for the device or, if no token
        can run, for embeddings."""
        request.stopwatch.turn_to(Part.QUEUED if self._planner.can_run(request) else Part.MEDIA, at)

    def _enqueue(self, request: LanguageRequest) -> None:
        self._check_role(request)
        block_size, adapters = self._state.blocks.block_size, self._state.adapters
        for i, prompt in enumerate(request.request.prompts):
            if prompt.adapter and not (adapters and adapters.has(prompt.adapter)):
                raise UnavailableError("this worker does not have the adapter of the request")
            positions = self._model.positions(prompt) if request.computes else None
            delta = 0 if positions is None else positions.delta
            hashes = BlockHashes(prompt, block_size) if request.codec == "raw" else None
            request.add_prompt(TokenSequence(f"{request.request_id}/{i}", prompt, positions, delta, hashes))
        request.stopwatch.turn_to(Part.BLOCKS, self._clock.now())
        if request.needs_embeddings:
            num_items = len(request.request.prompt.media)
            request.main.items_arrived(self._state.features.ready_items(request.request_id, num_items))
        self._lifecycle.count_missing(request)
        self._check_size(request)
        self._state.requests.deadlines.add(request.request_id, request.timeout_s)
        if request.computes:
            self._state.admission.keep_place(self._prompt_ticket(request), self._num_blocks(request))
        if (structure := request.request.structure) is None:
            return self._load(request)
        if self._state.constraints is None:
            raise InternalError("this worker holds no structures")
        self._state.constraints.prepare(request.request, structure, self._on_structure)

    def _on_structure(self, request_id: str, error: ClusterError | None) -> None:
        """The grammar of the request is here. Requests that have ended meanwhile are ignored."""
        if (request := self._state.requests.live(request_id)) is None:
            return
        if error is not None:
            return self._blame.take(request_id, error)
        with self._blame.of(request_id):
            self._state.runner.constrain(request)
            self._load(request)

    def _load(self, request: LanguageRequest) -> None:
        """A prefix from the second tier, if there is one; then the request waits for blocks."""
        loader, num_spare = self._state.loader, self._state.counts.num_admitted
        if (
            loader is None
            or not request.computes
            or request.scores_prompt
            or not loader.try_load(request, num_spare, self._queue_loaded)
        ):
            self._queue(request)

    def _queue_loaded(self, request_id: str) -> None:
        """Requests that have ended meanwhile are ignored."""
        if (request := self._state.requests.live(request_id)) is not None:
            with self._blame.of(request_id):
                self._queue(request)

    def _queue(self, request: LanguageRequest) -> None:
        ticket = self._prompt_ticket(request)
        if request.computes:
            self._state.admission.push(ticket, self._num_blocks(request))
        else:
            self._state.arrivals.push(ticket)

    def _check_role(self, request: LanguageRequest) -> None:
        """Doors know what a worker can do."""
        if request.computes and self._limits.max_prompt_tokens == 0:
            raise InternalError("this worker computes no prompts")
        if not request.sends and self._limits.max_sequences == 0:
            raise InternalError("this worker generates no answers")

    def _check_size(self, request: LanguageRequest) -> None:
        asked, blocks = request.request, self._state.blocks
        size, window, state_blocks = blocks.block_size, self._model.sliding_window, self._model.state_blocks
        capacity = blocks.num_blocks * size
        if request.sends and asked.num_prompt_blocks(size, state_blocks) > blocks.num_blocks:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; a prefill worker holds {capacity}"
            )
        num_wanted = asked.max_blocks(size, window, state_blocks)
        if not request.sends and num_wanted > blocks.num_blocks:
            raise RequestError(
                f"the request needs {num_wanted * size} tokens of KV cache; a decode worker holds {capacity}"
            )

    def _num_blocks(self, request: LanguageRequest) -> int:
        return request.request.num_prompt_blocks(self._state.blocks.block_size, self._model.state_blocks)

    def _prompt_ticket(self, request: LanguageRequest) -> Ticket:
        return self._ticket(request, request.request_id, request.num_prompt_tokens)

    def _ticket(self, request: LanguageRequest, name: str, num_tokens: int) -> Ticket:
        is_text = not request.needs_embeddings
        return Ticket(name, request.arrived_at, num_tokens, is_text, request.priority)

    def _try_admit(self, ticket: Ticket) -> bool:
        state, request = self._state, self._state.requests[ticket.request_id]
        num_blocks = self._num_blocks(request)
        if not (self._may_send(request.request_id) and state.admission.has_share(ticket, num_blocks)):
            return False
        spans = tuple(uncut_spans(self._model, sequence.prompt) for sequence in request.sequences)
        num_spare, state_blocks = state.counts.num_admitted, self._model.state_blocks
        if not try_allocate_prompts(request, state.blocks, num_spare, spans, state_blocks):
            return False
        if request.computes:
            state.admission.admit(ticket, num_blocks)
        else:
            state.arrivals.remove(ticket.request_id)
        request.admit(num_blocks if request.sends else 0)
        state.counts.admit(request)
        if not request.computes:
            self._grant(request)
            return True
        if request.sends:
            self._outbox.send(request.door, PrefillAdmitted(request.request_id))
        self.compute(request)
        return True

    def _grant(self, request: LanguageRequest) -> None:
        grant = self._state.kv_input.grant(request, self._planner.token_s)
        request.move(LanguagePhase.ARRIVING)
        self._outbox.send(request.door, DecodeGranted(request.request_id, grant))
