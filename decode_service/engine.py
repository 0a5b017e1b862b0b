"""The decode engine: owns every request of this worker and the KV block pool.

A step:
1. requests get blocks for their prompts, in the order of the queue;
2. if prompts are computed here (all of a prompt, or the end that does not travel), one local prefill step
   runs (`LocalPrefill`);
3. one step of the running batch is computed;
4. the doors are told.

Blocks for an answer are allocated as it grows. If every layer of the model has a window, blocks behind the
window are freed. If the pool has no free block, the newest request is preempted: it loses its blocks, and its
door has the rest of it computed again.

Runs on the worker's engine thread. Events of the transfer thread arrive as calls. An exception that a request
causes ends that request only (`Blame`). How requests end: `DecodeLifecycle`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from cluster.clock import Clock
from cluster.errors import InternalError, RequestError, UnavailableError
from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.fit import StepFit
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.scheduling.queue import WaitingQueue
from cluster.scheduling.running import choose_victim, select_batch
from cluster.types.messages import (
    DecodeGranted,
    DecodeTotals,
    FinishReason,
    KvReady,
    LoadReport,
    StartDecode,
    TokenEvent,
)
from cluster.worker.blame import Blame
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.requests import RequestTable
from cluster.worker.speed import SpeedReporter
from decode_service.counts import SequenceCounts
from decode_service.kv_input import KvInput
from decode_service.lifecycle import DecodeLifecycle
from decode_service.local_prefill import MAX_LOCAL_PREFILL_TOKENS, LocalPrefill
from decode_service.runner import DecodeRunner
from decode_service.state import DecodeChoice, DecodePhase, DecodeRequest
from decode_service.tables import (
    allocate_prompt_blocks,
    free_blocks_behind_window,
    share_prompt_blocks,
    try_grow,
)
from kv_transfer.lease.events import Aborted, Completed, LateWrite, LeaseEvent
from kv_transfer.lease.transfer import BlockTransfer

_id_of = attrgetter("request_id")


class DecodeEngine:
    def __init__(
        self,
        runner: DecodeRunner,
        blocks: BlockPool,
        transfer_engine: BlockTransfer,
        outbox: Outbox,
        clock: Clock,
        policy: SchedulingPolicy,
        max_batch_sequences: int,
        on_ended: Callable[[str], None],
        cpu_slots: CpuSlots,
        sliding_window: int | None = None,
        max_local_prefill_tokens: int = MAX_LOCAL_PREFILL_TOKENS,
        allows_recompute: bool = False,
    ):
        """`on_ended(request_id)` is called, on this thread, once for each request that leaves the engine.
        `sliding_window`: no layer of the model sees more tokens than that, the newest included.
        `allows_recompute`: see `KvInput`."""
        self._runner = runner
        self._blocks = blocks
        self._outbox = outbox
        self._clock = clock
        self._max_batch_sequences = max_batch_sequences
        self._requests: RequestTable[DecodeRequest] = RequestTable(clock)
        self._waiting = WaitingQueue(policy)
        self._running: deque[DecodeRequest] = deque()
        self._counts = SequenceCounts()
        self._kv_input = KvInput(transfer_engine, blocks, allows_recompute)
        self._lifecycle = DecodeLifecycle(
            self._requests, blocks, self._kv_input, self._counts, runner, outbox, self._unschedule, on_ended
        )
        self._blame = Blame(self._lifecycle.fail_named)
        self._local_prefill = LocalPrefill(
            runner, cpu_slots, policy, blocks.block_size, max_local_prefill_tokens, self._blame, self._probe
        )
        self._cpu_slots = cpu_slots
        self._window = sliding_window
        self.fit = StepFit(max_batch_sequences, 8192)  # a large step: so many sequences of so many tokens
        self._speed = SpeedReporter(
            outbox,
            clock,
            decode=self.fit,
            prefill=self._local_prefill.fit,
            max_step_units=max_local_prefill_tokens,
            codecs=transfer_engine.codecs,
        )

    @property
    def num_preempted(self) -> int:
        """Requests that lost their blocks, since the start."""
        return self._lifecycle.num_preempted

    def warm_up(self) -> None:
        """Measures how long a prompt takes here. Before the first request, on the caller's thread."""
        self._local_prefill.warm_up(self._blocks)

    def step(self) -> float | None:
        for request_id in self._requests.deadlines.expired():
            self._blame.run(request_id, self._lifecycle.expire, request_id)
        self._admit()
        if self._local_prefill:
            self._run_local_prefill()
        batch = select_batch(self._running, self._max_batch_sequences)
        if batch:
            self._run(batch)
        self._speed.report()
        self._outbox.flush(self.load())
        has_work = batch or self._local_prefill  # the step may have freed what a waiting request needs
        return 0 if has_work else self._requests.deadlines.wait_s()

    def _run_local_prefill(self) -> None:
        """First tokens go out at once, before the step of the running batch."""
        for request in self._local_prefill.run(is_alone=not self._running):
            self._blame.run(request.request_id, self._begin, request)
        self._outbox.flush(self.load())

    def _run(self, batch: list[DecodeRequest]) -> None:
        with self._cpu_slots.acquire():
            batch = self._with_blocks(batch)
            if not batch:  # all requests of the batch have been preempted
                return
            done = self._blame.together(batch, self._runner.run, _id_of, self._probe)
        if done:
            num_sequences = sum(request.num_sequences for request, _ in done)
            self.fit.observe(num_sequences, self._counts.mean_context, self._cpu_slots.ran_s)
        for request, tokens in done:
            self._blame.run(request.request_id, self._advance, request, tokens)

    def _probe(self) -> None:
        """Raises if the device is broken: computes one token that belongs to no request. Without a free
        block, the device counts as working."""
        block = self._blocks.try_allocate(1)
        if block is not None:
            self._runner.warm_up(1, 0, block)
            self._blocks.free(block)

    def start(self, door: DoorId, message: StartDecode) -> None:
        now = self._clock.now()
        arrived_at = now - message.request.waited_s
        request = DecodeRequest(
            message.request, door, message.timeout_s, arrived_at, now, message.prefills, message.codec
        )
        self._requests.add(request)
        self._counts.num_sequences += request.num_sequences
        self._blame.run(request.request_id, self._enqueue, request)

    def _enqueue(self, request: DecodeRequest) -> None:
        num_blocks, block_size = self._blocks.num_blocks, self._blocks.block_size
        num_wanted = request.request.max_blocks(block_size, self._window)
        if num_wanted > num_blocks:
            raise RequestError(
                f"the request needs {num_wanted * block_size} tokens of KV cache; a decode worker holds "
                f"{num_blocks * block_size}"
            )
        if request.prefills and (request.request.guidance or request.request.prompt.media):
            raise InternalError("decode computes only text prompts without a negative prompt")
        self._requests.deadlines.add(request.request_id, request.timeout_s)
        self._waiting.push(self._ticket(request))

    def cancel(self, request_id: str, choice_idx: int | None = None) -> None:
        """Frees a request, or one choice of it, in any state. Unknown requests and requests that have ended
        are ignored."""
        self._blame.run(request_id, self._lifecycle.cancel, request_id, choice_idx)

    def drop_door(self, door: DoorId) -> None:
        for request_id in self._requests.of_door(door):
            self.cancel(request_id)

    def on_transfer(self, event: LeaseEvent | LateWrite, at: float) -> None:
        """A lease has closed at the instant `at`: the KV is complete, the writer has given up, or the time is
        over. Called once per lease."""
        if isinstance(event, LateWrite):
            return self._lifecycle.fail_holders(event.block_ids)
        if (request := self._kv_input.pop_closed(event.lease_id)) is not None:
            self._blame.run(request.request_id, self._on_lease, request, event)

    def _on_lease(self, request: DecodeRequest, event: LeaseEvent) -> None:
        if request.is_closing:
            self._lifecycle.end(request)
        elif isinstance(event, Completed):
            request.ready = msgspec.msgpack.decode(event.payload, type=KvReady)
            self._on_kv_ready(request)
        else:
            why = event.reason if isinstance(event, Aborted) else "its lease ran out"
            message = f"the prompt's KV cache did not arrive: {why}"
            self._lifecycle.fail(request, UnavailableError(message))

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=self._counts.num_sequences,
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free,
            num_open_leases=self._kv_input.num_open_leases,
            totals=DecodeTotals(self.num_preempted, self._runner.num_drafted, self._runner.num_accepted),
            num_context_tokens=self._counts.num_context_tokens,
            received=self._kv_input.received,
            num_prompts=self._local_prefill.num_prompts,
            num_prompt_tokens=self._local_prefill.num_tokens,
        )

    def _ticket(self, request: DecodeRequest) -> Ticket:
        num_tokens = sum(len(prompt.token_ids) for prompt in request.request.prompts)
        is_text = not request.request.prompt.media
        return Ticket(request.request_id, request.arrived_at, num_tokens, is_text, request.priority)

    def _admit(self) -> None:
        """Blocks in the queue's order: no request overtakes a large one. One block is left for every sequence
        that was admitted before. Without it, a request could be preempted as soon as it is admitted."""
        while self._waiting:
            request = self._requests[self._waiting.peek().request_id]
            num_wanted = request.num_admission_blocks(self._blocks.block_size) + self._counts.num_admitted
            if num_wanted > self._blocks.num_free:
                return
            self._waiting.pop()
            self._blame.run(request.request_id, self._allocate_blocks, request)

    def _allocate_blocks(self, request: DecodeRequest) -> None:
        allocate_prompt_blocks(request, self._blocks)
        request.admitted_at = self._clock.now()
        self._counts.num_admitted += request.num_sequences
        if request.prefills:
            return self._on_kv_ready(request)
        grant = self._kv_input.grant(request, self._local_prefill.token_s)
        request.move(DecodePhase.GRANTED)
        self._outbox.send(request.door, DecodeGranted(request.request_id, grant))

    def _on_kv_ready(self, request: DecodeRequest) -> None:
        """All KV that travels is here."""
        first_recomputed = request.ready.first_recomputed
        if first_recomputed is None:
            return self._begin(request)
        request.move(DecodePhase.CATCHING_UP)
        request.num_computed_tokens = first_recomputed
        self._local_prefill.add(self._ticket(request), request)

    def _begin(self, request: DecodeRequest) -> None:
        """The KV of the prompts is complete. A choice that ends with its first token needs no blocks; its
        door has been told."""
        for choice, token_id in zip(request.choices, request.ready.first_tokens, strict=True):
            if choice.is_done:
                continue
            finish_reason = choice.append(token_id)
            if request.prefills:
                self._tell_first(request, choice, finish_reason)
            if finish_reason is not None:
                self._lifecycle.end_choice(request, choice)
        sources, targets = share_prompt_blocks(request, request.ready.position_deltas, self._blocks)
        if sources:
            self._runner.copy_blocks(sources, targets)
        for choice in request.live_choices:
            free_blocks_behind_window(choice, self._blocks, self._window)
        request.began_at = self._clock.now()
        if not request.live_choices:
            return self._lifecycle.end(request)
        request.move(DecodePhase.RUNNING)
        self._running.append(request)
        self._counts.run(request)

    def _tell_first(self, request: DecodeRequest, choice: DecodeChoice, reason: FinishReason | None) -> None:
        """The first token of a prompt that was computed here."""
        timing = request.prompt_timing(self._clock.now()) if choice.idx == 0 else None
        token_ids = tuple(choice.token_ids[-1:])
        event = TokenEvent(request.request_id, token_ids, reason, choice_idx=choice.idx, timing=timing)
        self._outbox.token(request.door, event)

    def _with_blocks(self, batch: list[DecodeRequest]) -> list[DecodeRequest]:
        """The requests of the batch that have blocks for this step's tokens. Newer requests may be preempted
        for them."""
        self._blame.together(batch, self._propose, _id_of, self._probe)
        for request in batch:
            self._blame.run(request.request_id, self._make_room, request)
        return [request for request in batch if request.request_id in self._requests]

    def _propose(self, batch: Sequence[DecodeRequest]) -> Sequence[DecodeRequest]:
        self._runner.propose(batch)
        return batch

    def _make_room(self, request: DecodeRequest) -> None:
        while request.request_id in self._requests and not try_grow(request, self._blocks):
            self._preempt(choose_victim(self._running))

    def _preempt(self, request: DecodeRequest) -> None:
        self._lifecycle.preempt(request)

    def _advance(self, request: DecodeRequest, tokens: Sequence[Sequence[int]]) -> None:
        """`tokens`: per live choice."""
        step_s = request.take_first_step_s(self._clock.now())
        for choice, drawn in zip(request.live_choices, tokens, strict=True):
            finish_reason, first_new = None, len(choice.token_ids)
            for token_id in drawn:
                finish_reason = choice.append(token_id)
                if finish_reason is not None:
                    break
            new = tuple(choice.token_ids[first_new:])
            self._counts.count_context(choice)
            event = TokenEvent(request.request_id, new, finish_reason, choice_idx=choice.idx, step_s=step_s)
            self._outbox.token(request.door, event)
            if finish_reason is None:
                free_blocks_behind_window(choice, self._blocks, self._window)
            else:
                self._lifecycle.end_choice(request, choice)
        if not request.live_choices:
            self._lifecycle.close(request)

    def _unschedule(self, request: DecodeRequest) -> None:
        if request.phase is DecodePhase.WAITING:
            self._waiting.remove(request.request_id)
        if request.phase is DecodePhase.CATCHING_UP:
            self._local_prefill.remove(request.request_id)
        if request.phase is DecodePhase.RUNNING:
            self._running.remove(request)
