"""The decode engine: owns every request of this worker and the block pool.

A step: give blocks to whoever can have them, run one token for the running batch, tell the doors. Runs on the worker's
engine thread; the only other actor is the transfer thread, whose events arrive here as calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from cluster.clock import Clock
from cluster.errors import ClusterError, RequestError, UnavailableError, to_info
from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.types.messages import (
    DecodeGranted,
    Failed,
    FinishReason,
    KvReady,
    LoadReport,
    StartDecode,
    TokenEvent,
)  # fmt: skip
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from decode_service.runner import DecodeRunner
from decode_service.scheduler import admit, select_batch
from decode_service.state import DecodeRequest, Phase
from kv_transfer.mover import Mover
from kv_transfer.receiver import Aborted, Completed, LeaseEvent


class DecodeEngine:
    def __init__(
        self,
        runner: DecodeRunner,
        blocks: BlockPool,
        mover: Mover,
        outbox: Outbox,
        clock: Clock,
        max_batch_requests: int,
        on_ended: Callable[[str], None],
    ):
        """`on_ended(request_id)` is called, on this thread, once for each request that leaves the engine."""
        self._runner = runner
        self._blocks = blocks
        self._mover = mover
        self._outbox = outbox
        self._deadlines = Deadlines(clock)
        self._max_batch_requests = max_batch_requests
        self._requests: dict[str, DecodeRequest] = {}
        self._by_lease: dict[str, DecodeRequest] = {}
        self._waiting: deque[DecodeRequest] = deque()
        self._running: deque[DecodeRequest] = deque()
        self._on_ended = on_ended

    def step(self) -> float | None:
        for request_id in self._deadlines.expired():
            self._expire(request_id)
        self._admit()
        batch = select_batch(self._running, self._max_batch_requests)
        if batch:
            for request, token_id in zip(batch, self._runner.run(batch), strict=True):
                self._advance(request, token_id)
        self._outbox.flush(self.load())
        return 0 if self._running else self._deadlines.wait_s()

    def start(self, door: DoorId, message: StartDecode) -> None:
        request = DecodeRequest(
            message.request_id,
            door,
            message.num_prompt_tokens,
            message.sampling,
            message.stop,
            message.timeout_s,
        )
        self._requests[request.request_id] = request
        if self._num_blocks(request) > self._blocks.num_blocks:
            error = RequestError(
                f"the request needs {request.num_tokens_reserved} tokens of KV cache; a decode worker holds "
                f"{self._blocks.num_blocks * self._blocks.block_size}"
            )
            return self._fail(request, error)
        self._deadlines.add(request.request_id, message.timeout_s)
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Free a request in whatever state it is. Unknown and ended requests are ignored."""
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.CLOSING:
            return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self._let_go(request)

    def drop_door(self, door: DoorId) -> None:
        for request in [r for r in self._requests.values() if r.door == door]:
            self.cancel(request.request_id)

    def on_transfer(self, event: LeaseEvent) -> None:
        """A lease has closed: KV complete, writer gave up, or time over. Exactly once per lease."""
        request = self._by_lease.pop(event.lease_id, None)
        if request is None:
            return
        if request.phase is Phase.CLOSING:
            self._end(request)
        elif isinstance(event, Completed):
            self._begin(request, event.payload)
        else:
            why = event.reason if isinstance(event, Aborted) else "its lease ran out"
            self._fail(request, UnavailableError(f"the prompt's KV cache did not arrive: {why}"))

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=len(self._requests),
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free,
            num_open_leases=len(self._by_lease),
        )

    def _num_blocks(self, request: DecodeRequest) -> int:
        return -(-request.num_tokens_reserved // self._blocks.block_size)

    def _admit(self) -> None:
        for request in admit(self._waiting, self._blocks.num_free, self._num_blocks):
            self._waiting.popleft()
            request.block_table = self._blocks.allocate(self._num_blocks(request))
            request.lease_id = new_lease_id()
            self._by_lease[request.lease_id] = request
            num_prompt_blocks = -(-request.num_prompt_tokens // self._blocks.block_size)
            prompt_blocks = request.block_table[:num_prompt_blocks]
            generations = [self._blocks.generation(block_id) for block_id in prompt_blocks]
            request.move(Phase.GRANTED)
            grant = self._mover.grant(request.lease_id, prompt_blocks, generations, request.timeout_s)
            self._outbox.send(request.door, DecodeGranted(request.request_id, grant))

    def _begin(self, request: DecodeRequest, payload: bytes) -> None:
        ready = msgspec.msgpack.decode(payload, type=KvReady)
        request.move(Phase.RUNNING)
        request.position_delta = ready.position_delta
        request.append(ready.first_token)
        self._running.append(request)

    def _advance(self, request: DecodeRequest, token_id: int) -> None:
        finish_reason = request.append(token_id)
        self._outbox.token(request.door, TokenEvent(request.request_id, (token_id,), finish_reason))
        if finish_reason is not None:
            self._let_go(request)

    def _expire(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.phase in (Phase.RUNNING, Phase.CLOSING):
            return
        waited_for = "free KV blocks" if request.phase is Phase.WAITING else "the prompt's KV cache"
        self._fail(request, UnavailableError(f"decode waited too long for {waited_for}"))

    def _fail(self, request: DecodeRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self._let_go(request)

    def _let_go(self, request: DecodeRequest) -> None:
        """Nobody wants the request any more. Blocks that a writer may still write to wait for their lease."""
        if request.lease_id in self._by_lease:
            request.move(Phase.CLOSING)
            self._mover.cancel(request.lease_id)
            return
        if request.phase is Phase.WAITING and request in self._waiting:
            self._waiting.remove(request)
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
        self._end(request)

    def _end(self, request: DecodeRequest) -> None:
        self._blocks.free(request.block_table)
        del self._requests[request.request_id]
        self._on_ended(request.request_id)
