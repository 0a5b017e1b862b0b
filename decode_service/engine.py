"""The decode engine: owns every request of this worker and the block pool.

A step: give blocks to whoever can have them, run one step of the running batch, tell the doors. Blocks for the answer are
given as it grows, and taken back behind the window where every layer of the model has one. When there are none left, the
newest request is preempted: it loses its blocks, and its door has what is left of it computed anew. What of a prompt does not
travel, its end or all of it, is computed here between the steps (`LocalPrefill`). Runs on the worker's engine thread; the only
other actor is the transfer thread, whose events arrive here as calls. What a request makes raise costs that request: see `Blame`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from cluster.clock import Clock
from cluster.errors import ClusterError, InternalError, RequestError, UnavailableError, to_info
from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.fit import StepFit
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.scheduling.queue import WaitingQueue
from cluster.scheduling.running import choose_victim, select_batch
from cluster.types.messages import (
    DecodeGranted,
    DecodeTotals,
    Failed,
    FinishReason,
    KvReady,
    LoadReport,
    Preempted,
    StartDecode,
    TokenEvent,
)  # fmt: skip
from cluster.worker.blame import Blame, bookkeeping
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.speed import Speed
from decode_service.local_prefill import MAX_LOCAL_PREFILL_TOKENS, LocalPrefill
from decode_service.runner import DecodeRunner
from decode_service.state import Choice, DecodeRequest, Phase, fail_holders
from decode_service.tables import leave_blocks, share_prompts, take_prompt_blocks, try_grow
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
        takes_ends: bool = False,
    ):
        """`on_ended(request_id)` is called, on this thread, once for each request that leaves the engine. `sliding_window`: no
        layer of the model sees more tokens than that, the newest included. `takes_ends`: prefill workers may leave the ends of
        prompts to this one, and are told how long a token takes here."""
        self._runner = runner
        self._blocks = blocks
        self._transfer_engine = transfer_engine
        self._outbox = outbox
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._max_batch_sequences = max_batch_sequences
        self._requests: dict[str, DecodeRequest] = {}
        self._by_lease: dict[str, DecodeRequest] = {}
        self._waiting = WaitingQueue(policy)
        self._running: deque[DecodeRequest] = deque()
        self._blame = Blame(self._fail_named)
        self._local_prefill = LocalPrefill(
            runner, cpu_slots, policy, blocks.block_size, max_local_prefill_tokens, self._blame, self._probe
        )
        self._takes_ends = takes_ends
        self._on_ended = on_ended
        self._cpu_slots = cpu_slots
        self._window = sliding_window
        self.fit = StepFit(max_batch_sequences, 8192)  # a large step: so many sequences of so many tokens
        self._speed = Speed(
            outbox,
            clock,
            decode=self.fit,
            prefill=self._local_prefill.fit,
            max_step_units=max_local_prefill_tokens,
            codecs=transfer_engine.codecs,
        )
        self._num_running_sequences = self._num_context_tokens = 0  # of requests that run
        self._num_sequences = 0  # of all requests
        self._num_admitted_sequences = 0  # of those that have blocks
        self.num_preempted = 0  # requests that lost their blocks, since the start

    def warm_up(self) -> None:
        """Before the first request, on the caller's thread: learns how long a prompt takes here."""
        self._local_prefill.warm_up(self._blocks)

    def step(self) -> float | None:
        for request_id in self._deadlines.expired():
            self._blame.run(request_id, self._expire, request_id)
        self._admit()
        if self._local_prefill:
            self._run_stretch()
        batch = select_batch(self._running, self._max_batch_sequences)
        if batch:
            self._run(batch)
        self._speed.tell()
        self._outbox.flush(self.load())
        has_work = batch or self._local_prefill  # who ran may have freed what somebody waits for
        return 0 if has_work else self._deadlines.wait_s()

    def _run_stretch(self) -> None:
        """First tokens go out at once: a step follows."""
        for request in self._local_prefill.run():
            self._blame.run(request.request_id, self._begin, request)
        self._outbox.flush(self.load())

    def _run(self, batch: list[DecodeRequest]) -> None:
        with self._cpu_slots.acquire():
            batch = self._with_blocks(batch)
            if not batch:  # all that were to run have been preempted
                return
            done = self._blame.together(batch, self._runner.run, _id_of, self._probe)
        if done:
            context = self._num_context_tokens / self._num_running_sequences
            self.fit.observe(
                sum(request.num_sequences for request, _ in done), context, self._cpu_slots.ran_s
            )
        for request, tokens in done:
            self._blame.run(request.request_id, self._advance, request, tokens)

    def _probe(self) -> None:
        """Whether the device still works: one token that belongs to no request. Without a free block for it, the answer is yes."""
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
        self._requests[request.request_id] = request
        self._num_sequences += request.num_sequences
        self._blame.run(request.request_id, self._take_in, request)

    def _take_in(self, request: DecodeRequest) -> None:
        num_blocks, block_size = self._blocks.num_blocks, self._blocks.block_size
        num_wanted = request.request.max_blocks(block_size, self._window)
        if num_wanted > num_blocks:
            raise RequestError(
                f"the request needs {num_wanted * block_size} tokens of KV cache; a decode worker holds "
                f"{num_blocks * block_size}"
            )
        if request.prefills and (request.request.guidance or request.request.prompt.media):
            raise InternalError("decode computes a text without a companion only")
        self._deadlines.add(request.request_id, request.timeout_s)
        self._waiting.push(self._ticket(request))

    def cancel(self, request_id: str, choice_idx: int | None = None) -> None:
        """Free a request, or one choice of it, in whatever state it is. Unknown and ended ones are ignored."""
        self._blame.run(request_id, self._cancel, request_id, choice_idx)

    def _cancel(self, request_id: str, choice_idx: int | None) -> None:
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.CLOSING:
            return
        if choice_idx is not None:
            self._end_choice(request, request.choices[choice_idx])
            if request.live_choices:
                return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self._let_go(request)

    def drop_door(self, door: DoorId) -> None:
        for request in [r for r in self._requests.values() if r.door == door]:
            self.cancel(request.request_id)

    def on_transfer(self, event: LeaseEvent | LateWrite, at: float) -> None:
        """A lease has closed: KV complete, writer gave up, or time over. Exactly once per lease. `at`: when."""
        if isinstance(event, LateWrite):
            return fail_holders(event.block_ids, self._requests, self._fail)
        if (request := self._by_lease.pop(event.lease_id, None)) is not None:
            self._blame.run(request.request_id, self._on_lease, request, event)

    def _on_lease(self, request: DecodeRequest, event: LeaseEvent) -> None:
        if request.phase is Phase.CLOSING:
            self._end(request)
        elif isinstance(event, Completed):
            request.ready = msgspec.msgpack.decode(event.payload, type=KvReady)
            self._take_over(request)
        else:
            why = event.reason if isinstance(event, Aborted) else "its lease ran out"
            self._fail(request, UnavailableError(f"the prompt's KV cache did not arrive: {why}"))

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_queued_units=self._num_sequences,
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free,
            num_open_leases=len(self._by_lease),
            totals=DecodeTotals(self.num_preempted, self._runner.num_drafted, self._runner.num_accepted),
            num_context_tokens=self._num_context_tokens,
        )

    def _ticket(self, request: DecodeRequest) -> Ticket:
        num_tokens = sum(len(prompt.token_ids) for prompt in request.request.prompts)
        is_text = not request.request.prompt.media
        return Ticket(request.request_id, request.arrived_at, num_tokens, is_text, request.priority)

    def _admit(self) -> None:
        """Blocks in the queue's order: nobody overtakes a large request. One block is left for every sequence that was
        admitted before, or a newcomer would be preempted at once."""
        while self._waiting:
            request = self._requests[self._waiting.peek().request_id]
            num_wanted = request.num_admission_blocks(self._blocks.block_size) + self._num_admitted_sequences
            if num_wanted > self._blocks.num_free:
                return
            self._waiting.pop()
            self._blame.run(request.request_id, self._give_blocks, request)

    def _give_blocks(self, request: DecodeRequest) -> None:
        take_prompt_blocks(request, self._blocks)
        request.admitted_at = self._clock.now()
        self._num_admitted_sequences += request.num_sequences
        if request.prefills:
            self._take_over(request)
        else:
            self._grant(request)

    def _grant(self, request: DecodeRequest) -> None:
        lease_id = new_lease_id()
        granted = [block_id for table in request.prompt_blocks for block_id in table]
        generations = self._blocks.generations(granted)
        is_coded = request.codec != "raw"
        lengths = [len(prompt.token_ids) for prompt in request.request.prompts] if is_coded else ()
        grant = self._transfer_engine.grant(lease_id, granted, generations, request.timeout_s, lengths)
        request.lease_id = lease_id
        self._by_lease[lease_id] = request
        request.move(Phase.GRANTED)
        if self._takes_ends:
            grant = msgspec.structs.replace(grant, token_s=self._local_prefill.token_s)
        self._outbox.send(request.door, DecodeGranted(request.request_id, grant))

    def _take_over(self, request: DecodeRequest) -> None:
        """What travels of the KV is here."""
        first_recomputed = request.ready.first_recomputed
        if first_recomputed is None:
            return self._begin(request)
        request.move(Phase.CATCHING_UP)
        request.num_computed_tokens = first_recomputed
        self._local_prefill.add(self._ticket(request), request)

    def _begin(self, request: DecodeRequest) -> None:
        """All KV is here. A choice that its first token ends, as the door has been told, needs no blocks."""
        for choice, token_id in zip(request.choices, request.ready.first_tokens, strict=True):
            if choice.is_done:
                continue
            finish_reason = choice.append(token_id)
            if request.prefills:
                self._tell_first(request, choice, finish_reason)
            if finish_reason is not None:
                self._end_choice(request, choice)
        sources, targets = share_prompts(request, request.ready.position_deltas, self._blocks)
        if sources:
            self._runner.copy_blocks(sources, targets)
        for choice in request.live_choices:
            leave_blocks(choice, self._blocks, self._window)
        request.began_at = self._clock.now()
        if not request.live_choices:
            return self._end(request)
        request.move(Phase.RUNNING)
        self._running.append(request)
        for choice in request.live_choices:
            self._num_running_sequences += len(choice.branches)
            self._count_context(choice)

    def _tell_first(self, request: DecodeRequest, choice: Choice, reason: FinishReason | None) -> None:
        """The first token of a prompt that was computed here."""
        timing = request.prompt_timing(self._clock.now()) if choice.idx == 0 else None
        token_ids = tuple(choice.token_ids[-1:])
        event = TokenEvent(request.request_id, token_ids, reason, choice_idx=choice.idx, timing=timing)
        self._outbox.token(request.door, event)

    def _with_blocks(self, batch: list[DecodeRequest]) -> list[DecodeRequest]:
        """Those of the batch that have blocks for this step's tokens; newer requests may lose theirs for it."""
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
        self.num_preempted += 1
        self._outbox.send(request.door, Preempted(request.request_id))
        self._let_go(request)

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
            self._count_context(choice)
            event = TokenEvent(request.request_id, new, finish_reason, choice_idx=choice.idx, step_s=step_s)
            self._outbox.token(request.door, event)
            if finish_reason is None:
                leave_blocks(choice, self._blocks, self._window)
            else:
                self._end_choice(request, choice)
        if not request.live_choices:
            self._let_go(request)

    def _count_context(self, choice: Choice) -> None:
        self._num_context_tokens += choice.num_context_tokens - choice.num_counted_tokens
        choice.num_counted_tokens = choice.num_context_tokens

    @bookkeeping
    def _end_choice(self, request: DecodeRequest, choice: Choice) -> None:
        if choice.is_done:
            return
        choice.is_done = True
        num_sequences = len(request.request.prompts)
        self._num_sequences -= num_sequences
        if request.admitted_at is not None:
            self._num_admitted_sequences -= num_sequences
        if request.phase is Phase.RUNNING:
            self._num_running_sequences -= len(choice.branches)
        self._num_context_tokens -= choice.num_counted_tokens
        for branch in choice.branches:
            self._blocks.free(branch.blocks)
        choice.branches = []
        self._runner.forget(choice)

    def _expire(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.phase in (Phase.RUNNING, Phase.CLOSING):
            return
        waited_for = {
            Phase.WAITING: "free KV blocks",
            Phase.GRANTED: "the prompt's KV cache",
            Phase.CATCHING_UP: "its turn to compute the prompt",
        }[request.phase]
        self._fail(request, UnavailableError(f"decode waited too long for {waited_for}"))

    def _fail_named(self, request_id: str, error: ClusterError) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.CLOSING:
            self._fail(request, error)

    def _fail(self, request: DecodeRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self._let_go(request)

    @bookkeeping
    def _let_go(self, request: DecodeRequest) -> None:
        """Nobody wants the request any more. Blocks that a writer may still write to wait for their lease."""
        if request.lease_id in self._by_lease:
            request.move(Phase.CLOSING)
            self._transfer_engine.cancel(request.lease_id)
            return
        if request.phase is Phase.WAITING:
            self._waiting.remove(request.request_id)
        if request.phase is Phase.CATCHING_UP:
            self._local_prefill.remove(request.request_id)
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
        self._end(request)

    @bookkeeping
    def _end(self, request: DecodeRequest) -> None:
        for choice in request.live_choices:
            self._end_choice(request, choice)
        for table in (*request.prompt_blocks, request.copy_blocks):
            self._blocks.free(table)
        del self._requests[request.request_id]
        self._on_ended(request.request_id)
