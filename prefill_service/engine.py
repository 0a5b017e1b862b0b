"""The prefill engine: owns every request of this worker and the KV block pool.

A step: give blocks to whoever can have them (reusing cached prefixes), run one packed batch of chunks, post what was
computed to decode, tell the doors. Runs on the worker's engine thread; transfer events and door messages arrive as calls.
"""

from __future__ import annotations

from collections import deque

from cluster.clock import Clock
from cluster.errors import ClusterError, RequestError, UnavailableError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import block_hashes
from cluster.model.language import LanguageModel
from cluster.types.messages import Failed, FinishReason, LoadReport, StartPrefill, TokenEvent
from cluster.types.transfer import Grant
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from kv_transfer.agent import TransferError
from kv_transfer.mover import Mover
from kv_transfer.receiver import Aborted, Completed, LeaseEvent
from kv_transfer.sender import Finished, SendEvent
from prefill_service.features import FeatureStore
from prefill_service.runner import PrefillRunner, uncut_spans
from prefill_service.scheduler import Candidate, schedule, usable_prefix
from prefill_service.state import Phase, PrefillRequest
from prefill_service.transfer import send_computed


class PrefillEngine:
    def __init__(
        self,
        model: LanguageModel,
        runner: PrefillRunner,
        blocks: BlockPool,
        features: FeatureStore,
        mover: Mover,
        outbox: Outbox,
        clock: Clock,
        max_batch_tokens: int,
    ):
        self._model = model
        self._runner = runner
        self._blocks = blocks
        self._features = features
        self._mover = mover
        self._outbox = outbox
        self._deadlines = Deadlines(clock)
        self._max_batch_tokens = max_batch_tokens
        self._requests: dict[str, PrefillRequest] = {}
        self._waiting: deque[PrefillRequest] = deque()
        self._running: dict[str, PrefillRequest] = {}  # in order of arrival
        self._by_lease: dict[str, PrefillRequest] = {}  # outgoing transfers

    def step(self) -> float | None:
        for request_id in self._deadlines.expired():
            self._expire(request_id)
        self._admit()
        candidates = (self._candidate(request) for request in self._running.values())
        chunks = schedule(candidates, self._max_batch_tokens)
        if chunks:
            batch = [(self._running[chunk.request_id], chunk.num_scheduled_tokens) for chunk in chunks]
            for (request, count), first_token in zip(batch, self._runner.run(batch), strict=True):
                self._advance(request, count, first_token)
        self._outbox.flush(self.load())
        return 0 if chunks else self._deadlines.wait_s()

    def start(self, door: DoorId, message: StartPrefill) -> None:
        prompt = message.request.prompt
        try:
            positions = self._model.positions(prompt)
        except ClusterError as error:  # a prompt that this family cannot place
            self._release_features(message)
            return self._outbox.send(door, Failed(message.request.request_id, to_info(error)))
        request = PrefillRequest(door, message, positions, block_hashes(prompt, self._blocks.block_size))
        self._requests[request.request_id] = request
        if self._num_blocks(request) > self._blocks.num_blocks:
            capacity = self._blocks.num_blocks * self._blocks.block_size
            error = RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; a prefill worker holds {capacity}"
            )
            return self._fail(request, error)
        self._deadlines.add(request.request_id, message.timeout_s)
        self._waiting.append(request)

    def set_target(self, request_id: str, grant: Grant) -> None:
        """Decode's grant has come. For a request that has ended, the right is given back at once."""
        request = self._requests.get(request_id)
        try:
            outgoing = self._mover.open(grant)
        except TransferError as error:
            if request is not None:
                self._fail(request, UnavailableError(f"cannot write to the decode worker: {error}"))
            return
        if request is None or request.phase is Phase.CLOSING:
            outgoing.abort("the request has ended")
            return
        request.outgoing = outgoing
        self._by_lease[grant.lease_id] = request
        self._send_computed(request)

    def cancel(self, request_id: str) -> None:
        """Free a request in whatever state it is. Unknown and ended requests are ignored."""
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.CLOSING:
            return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self._let_go(request, "cancelled")

    def drop_door(self, door: DoorId) -> None:
        for request in [r for r in self._requests.values() if r.door == door]:
            self.cancel(request.request_id)

    def on_transfer(self, event: LeaseEvent | SendEvent) -> None:
        """A lease on our features, or a transfer of ours, has closed. Exactly once each."""
        request = self._by_lease.pop(event.lease_id, None)
        if request is not None:
            return self._on_sent(request, event)
        key = self._features.close_lease(event.lease_id, completed=isinstance(event, Completed))
        request = self._requests.get(key[0]) if key is not None else None
        if request is None or key is None:
            return
        if isinstance(event, Completed):
            request.items_ready.add(key[1])
        else:
            why = event.reason if isinstance(event, Aborted) else "their lease ran out"
            self._fail(request, UnavailableError(f"embeddings of media item {key[1]} did not arrive: {why}"))

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=sum(
                r.num_prompt_tokens - r.num_computed_tokens for r in self._requests.values()
            ),
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free + self._features.num_used_blocks,
            num_open_leases=len(self._by_lease) + self._features.num_open_leases,
            num_cached_blocks=self._blocks.num_cached,
        )

    def _num_blocks(self, request: PrefillRequest) -> int:
        return -(-request.num_prompt_tokens // self._blocks.block_size)

    def _candidate(self, request: PrefillRequest) -> Candidate:
        return Candidate(
            request.request_id,
            request.num_computed_tokens,
            request.num_ready_tokens,
            uncut_spans(self._model, request),
        )

    def _admit(self) -> None:
        """Blocks in order of arrival: nobody overtakes a long prompt."""
        while self._waiting and self._try_admit(self._waiting[0]):
            request = self._waiting.popleft()
            request.move(Phase.RUNNING)
            self._running[request.request_id] = request
            self._release_merged(request)
            self._send_computed(request)

    def _try_admit(self, request: PrefillRequest) -> bool:
        block_size = self._blocks.block_size
        cached = self._blocks.lookup(request.block_hashes)
        usable = usable_prefix(
            len(cached) * block_size, request.num_prompt_tokens, block_size, uncut_spans(self._model, request)
        )
        num_cached_blocks = usable // block_size
        self._blocks.free(cached[num_cached_blocks:])
        fresh = self._blocks.try_allocate(self._num_blocks(request) - num_cached_blocks)
        if fresh is None:
            self._blocks.free(cached[:num_cached_blocks])
            return False
        request.block_table = cached[:num_cached_blocks] + fresh
        request.num_cached_tokens = request.num_computed_tokens = usable
        return True

    def _advance(self, request: PrefillRequest, count: int, first_token: int | None) -> None:
        block_size = self._blocks.block_size
        first_new = request.num_computed_tokens // block_size
        request.num_computed_tokens += count
        for i in range(first_new, request.num_computed_tokens // block_size):
            self._blocks.register(request.block_table[i], request.block_hashes[i])
        self._release_merged(request)
        if first_token is not None:
            self._first_token(request, first_token)
        else:
            self._send_computed(request)

    def _release_merged(self, request: PrefillRequest) -> None:
        for item_idx, span in enumerate(request.message.request.prompt.media):
            if span.end <= request.num_computed_tokens:
                self._features.release((request.request_id, item_idx))

    def _release_features(self, message: StartPrefill) -> None:
        """All of them; those that are gone already are ignored."""
        for item_idx in range(len(message.request.prompt.media)):
            self._features.release((message.request.request_id, item_idx))

    def _first_token(self, request: PrefillRequest, token_id: int) -> None:
        """The prompt is computed. The token goes out at once; KV follows, unless the token already ends the answer."""
        stop = request.message.request.stop
        finish_reason = None
        if token_id in stop.stop_token_ids:
            finish_reason = FinishReason.STOP
        elif stop.max_tokens == 1:
            finish_reason = FinishReason.LENGTH
        event = TokenEvent(request.request_id, (token_id,), finish_reason, request.num_cached_tokens)
        self._outbox.token(request.door, event)
        del self._running[request.request_id]
        request.move(Phase.SENDING)
        if finish_reason is None:
            request.first_token = token_id
            self._send_computed(request)
        # Else the door's Cancel ends the request: were the lease aborted now, decode's failure could overtake this token.

    def _send_computed(self, request: PrefillRequest) -> None:
        try:
            send_computed(request, self._blocks.block_size)
        except TransferError as error:
            self._fail(request, UnavailableError(f"cannot write to the decode worker: {error}"))

    def _on_sent(self, request: PrefillRequest, event: LeaseEvent | SendEvent) -> None:
        if request.phase is Phase.CLOSING or isinstance(event, Finished):
            self._end(request)
        else:
            error = UnavailableError(f"the KV cache could not be sent to the decode worker: {event}")
            self._fail(request, error)

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
        self._release_features(request.message)
        if request.phase is Phase.WAITING and request in self._waiting:
            self._waiting.remove(request)
        self._running.pop(request.request_id, None)
        if request.outgoing is not None and request.outgoing.lease_id in self._by_lease:
            request.move(Phase.CLOSING)
            request.outgoing.abort(reason)
        else:
            self._end(request)

    def _end(self, request: PrefillRequest) -> None:
        self._release_features(request.message)
        self._running.pop(request.request_id, None)
        self._blocks.free(request.block_table)
        del self._requests[request.request_id]
