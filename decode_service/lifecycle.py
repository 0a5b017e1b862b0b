"""How the requests of a decode worker, and their choices, end: the doors are told, and everything that they
hold is freed.

A request ends when its last choice is complete, when its door cancels it, when it is preempted, when it
fails, or when it waits too long. If its blocks are leased to a prefill worker then, the request is CLOSING
until the lease has closed. Used on the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.errors import ClusterError, UnavailableError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.types.messages import Failed, FinishReason, Preempted, TokenEvent
from cluster.worker.blame import bookkeeping
from cluster.worker.outbox import Outbox
from cluster.worker.requests import RequestTable
from decode_service.counts import SequenceCounts
from decode_service.kv_input import KvInput
from decode_service.runner import DecodeRunner
from decode_service.state import DecodeChoice, DecodePhase, DecodeRequest


class DecodeLifecycle:
    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        blocks: BlockPool,
        kv_input: KvInput,
        counts: SequenceCounts,
        runner: DecodeRunner,
        outbox: Outbox,
        unschedule: Callable[[DecodeRequest], None],
        on_ended: Callable[[str], None],
    ):
        """`unschedule(request)`: no further step computes tokens of the request. `on_ended(request_id)` is
        called once for each request that leaves the engine."""
        self._requests = requests
        self._blocks = blocks
        self._kv_input = kv_input
        self._counts = counts
        self._runner = runner
        self._outbox = outbox
        self._unschedule = unschedule
        self._on_ended = on_ended
        self.num_preempted = 0  # requests, since the start

    def cancel(self, request_id: str, choice_idx: int | None) -> None:
        """Ends a request, or one choice of it. Unknown requests and requests that have ended are ignored."""
        request = self._requests.live(request_id)
        if request is None:
            return
        if choice_idx is not None:
            self.end_choice(request, request.choices[choice_idx])
            if request.live_choices:
                return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self.close(request)

    def preempt(self, request: DecodeRequest) -> None:
        """The request loses its blocks. Its door asks for the rest of it again."""
        self.num_preempted += 1
        self._outbox.send(request.door, Preempted(request.request_id))
        self.close(request)

    def expire(self, request_id: str) -> None:
        """The request has waited too long. Requests that run or have ended are ignored."""
        request = self._requests.live(request_id)
        if request is None or request.phase is DecodePhase.RUNNING:
            return
        waited_for = {
            DecodePhase.WAITING: "free KV blocks",
            DecodePhase.GRANTED: "the prompt's KV cache",
            DecodePhase.CATCHING_UP: "its turn to compute the prompt",
        }[request.phase]
        self.fail(request, UnavailableError(f"decode waited too long for {waited_for}"))

    def fail_named(self, request_id: str, error: ClusterError) -> None:
        """Unknown requests and requests that have ended are ignored."""
        if (request := self._requests.live(request_id)) is not None:
            self.fail(request, error)

    def fail(self, request: DecodeRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self.close(request)

    def fail_holders(self, block_ids: Iterable[int]) -> None:
        """A prefill worker has written to these blocks after its lease had been revoked (`LateWrite` of
        `kv_transfer.lease.receiver`). All requests that hold one of the blocks fail."""
        overwritten = set(block_ids)
        for request in list(self._requests.values()):
            if not request.is_closing and not overwritten.isdisjoint(request.held_blocks):
                self.fail(
                    request, UnavailableError("its KV cache was overwritten by a worker that came late")
                )

    @bookkeeping
    def close(self, request: DecodeRequest) -> None:
        """Ends the request. Blocks that a prefill worker may still write to are freed when their lease has
        closed."""
        if self._kv_input.try_cancel(request):
            request.move(DecodePhase.CLOSING)
            return
        self._unschedule(request)
        self.end(request)

    @bookkeeping
    def end(self, request: DecodeRequest) -> None:
        for choice in request.live_choices:
            self.end_choice(request, choice)
        for table in (*request.prompt_blocks, request.copy_blocks):
            self._blocks.free(table)
        self._requests.remove(request.request_id)
        self._on_ended(request.request_id)

    @bookkeeping
    def end_choice(self, request: DecodeRequest, choice: DecodeChoice) -> None:
        """Frees what the choice holds. A choice that has ended is ignored."""
        if choice.is_done:
            return
        choice.is_done = True
        self._counts.end_choice(request, choice)
        for branch in choice.branches:
            self._blocks.free(branch.blocks)
        choice.branches = []
        self._runner.forget(choice)
