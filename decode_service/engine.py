"""The decode engine: owns every request of this worker and the block pool.

A step: give blocks to whoever can have them, run one step of the running batch, tell the doors. Blocks for the answer are
given as it grows, and taken back behind the window where every layer of the model has one. When there are none left, the
newest request is preempted: it loses its blocks, and its door has what is left of it computed anew. Runs on the worker's
engine thread; the only other actor is the transfer thread, whose events arrive here as calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from cluster.clock import Clock
from cluster.errors import ClusterError, RequestError, UnavailableError, to_info
from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
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
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.turns import Turns
from decode_service.runner import DecodeRunner
from decode_service.state import Branch, Choice, DecodeRequest, Phase
from kv_transfer.group import GroupMover
from kv_transfer.mover import Mover
from kv_transfer.receiver import Aborted, Completed, LeaseEvent

WARM_UP_TOKENS = 128
STRETCH_S = 0.05  # that the others wait while a prompt's end is computed
MIN_TOKEN_S = 1e-7  # a clock that stands still does not make computing free
NEW_SHARE = 0.25  # of the newest measurement in how long a token takes


class DecodeEngine:
    def __init__(
        self,
        runner: DecodeRunner,
        blocks: BlockPool,
        mover: Mover | GroupMover,
        outbox: Outbox,
        clock: Clock,
        policy: SchedulingPolicy,
        max_batch_sequences: int,
        on_ended: Callable[[str], None],
        turns: Turns,
        sliding_window: int | None = None,
    ):
        """`on_ended(request_id)` is called, on this thread, once for each request that leaves the engine. `sliding_window`: no
        layer of the model sees more tokens than that, the newest included."""
        self._runner = runner
        self._blocks = blocks
        self._mover = mover
        self._outbox = outbox
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._max_batch_sequences = max_batch_sequences
        self._requests: dict[str, DecodeRequest] = {}
        self._by_lease: dict[str, DecodeRequest] = {}
        self._waiting = WaitingQueue(policy)
        self._running: deque[DecodeRequest] = deque()
        self._catching_up: deque[DecodeRequest] = deque()
        self._token_s: float | None = (
            None  # for a prompt's token to be computed here; None: prompts come whole
        )
        self._on_ended = on_ended
        self._turns = turns
        self._window = sliding_window
        self._num_sequences = 0  # of all requests
        self._num_admitted_sequences = 0  # of those that have blocks
        self.num_preempted = 0  # requests that lost their blocks, since the start

    def warm_up(self) -> None:
        """Before the first request, on the caller's thread: learns how long a token of a prompt takes here. From then on the ends of
        prompts may be left to this worker."""
        table = self._blocks.allocate(
            min(-(-WARM_UP_TOKENS // self._blocks.block_size), self._blocks.num_free)
        )
        for _ in range(2):
            self._token_s = None
            self._compute([0] * len(table) * self._blocks.block_size, 0, 0, table)
        self._blocks.free(table)

    def step(self) -> float | None:
        for request_id in self._deadlines.expired():
            self._expire(request_id)
        self._admit()
        if self._catching_up:
            self._catch_up(self._catching_up[0])
        batch = select_batch(self._running, self._max_batch_sequences)
        if batch:
            self._run(batch)
        self._outbox.flush(self.load())
        has_work = batch or self._catching_up  # who ran may have freed what somebody waits for
        return 0 if has_work else self._deadlines.wait_s()

    def _run(self, batch: list[DecodeRequest]) -> None:
        with self._turns.hold():
            batch = self._with_blocks(batch)
            drawn = self._runner.run(batch) if batch else []  # whoever was to run may all have been preempted
        for request, tokens in zip(batch, drawn, strict=True):
            self._advance(request, tokens)

    def start(self, door: DoorId, message: StartDecode) -> None:
        now = self._clock.now()
        request = DecodeRequest(message.request, door, message.timeout_s, now - message.request.waited_s)
        self._requests[request.request_id] = request
        self._num_sequences += request.num_sequences
        num_blocks, block_size = self._blocks.num_blocks, self._blocks.block_size
        num_wanted = message.request.max_blocks(block_size, self._window)
        if num_wanted > num_blocks:
            error = RequestError(
                f"the request needs {num_wanted * block_size} tokens of KV cache; a decode worker holds "
                f"{num_blocks * block_size}"
            )
            return self._fail(request, error)
        self._deadlines.add(request.request_id, message.timeout_s)
        self._waiting.push(self._ticket(request))

    def cancel(self, request_id: str, choice_idx: int | None = None) -> None:
        """Free a request, or one choice of it, in whatever state it is. Unknown and ended ones are ignored."""
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

    def on_transfer(self, event: LeaseEvent) -> None:
        """A lease has closed: KV complete, writer gave up, or time over. Exactly once per lease."""
        request = self._by_lease.pop(event.lease_id, None)
        if request is None:
            return
        if request.phase is Phase.CLOSING:
            self._end(request)
        elif isinstance(event, Completed):
            self._take_over(request, msgspec.msgpack.decode(event.payload, type=KvReady))
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
        )

    def _ticket(self, request: DecodeRequest) -> Ticket:
        num_tokens = sum(len(prompt.token_ids) for prompt in request.request.prompts)
        is_text = not request.request.prompt.media
        return Ticket(request.request_id, request.arrived_at, request.priority, num_tokens, is_text)

    def _admit(self) -> None:
        """Blocks in the queue's order: nobody overtakes a large request. One block is left for every sequence that was
        admitted before, or a newcomer would be preempted at once."""
        while self._waiting:
            request = self._requests[self._waiting.peek().request_id]
            num_wanted = request.num_admission_blocks(self._blocks.block_size) + self._num_admitted_sequences
            if num_wanted > self._blocks.num_free:
                return
            self._waiting.pop()
            self._grant(request)

    def _grant(self, request: DecodeRequest) -> None:
        block_size = self._blocks.block_size
        lengths = [len(prompt.token_ids) for prompt in request.request.prompts]
        request.prompt_blocks = [self._blocks.allocate(-(-length // block_size)) for length in lengths]
        num_copies = request.num_admission_blocks(block_size) - sum(map(len, request.prompt_blocks))
        request.copy_blocks = self._blocks.allocate(num_copies)
        request.lease_id = new_lease_id()
        self._by_lease[request.lease_id] = request
        request.move(Phase.GRANTED)
        self._num_admitted_sequences += request.num_sequences
        granted = [block_id for table in request.prompt_blocks for block_id in table]
        generations = self._blocks.generations(granted)
        grant = self._mover.grant(request.lease_id, granted, generations, request.timeout_s, lengths)
        grant = msgspec.structs.replace(grant, token_s=self._token_s)
        self._outbox.send(request.door, DecodeGranted(request.request_id, grant))

    def _take_over(self, request: DecodeRequest, ready: KvReady) -> None:
        """What travels of the KV is here."""
        if ready.first_recomputed is None:
            return self._begin(request, ready)
        request.move(Phase.CATCHING_UP)
        request.num_computed_tokens, request.ready = ready.first_recomputed, ready
        self._catching_up.append(request)

    def _catch_up(self, request: DecodeRequest) -> None:
        """The next stretch of a prompt whose end did not travel."""
        assert request.ready is not None and self._token_s is not None
        prompt, start = request.request.prompt.token_ids, request.num_computed_tokens
        count = max(self._blocks.block_size, int(STRETCH_S / self._token_s))
        request.num_computed_tokens = min(start + count, len(prompt))
        tokens = prompt[start : request.num_computed_tokens]
        self._compute(tokens, start, request.ready.position_deltas[0], request.prompt_blocks[0])
        if request.num_computed_tokens == len(prompt):
            self._catching_up.popleft()
            self._begin(request, request.ready)

    def _compute(self, token_ids: Sequence[int], start: int, delta: int, table: Sequence[int]) -> None:
        with self._turns.hold():
            self._runner.compute(token_ids, start, delta, table)
        newest = self._turns.ran_s / len(token_ids)
        old = newest if self._token_s is None else self._token_s
        self._token_s = max(MIN_TOKEN_S, old + NEW_SHARE * (newest - old))

    def _begin(self, request: DecodeRequest, ready: KvReady) -> None:
        """All KV is here. A choice that its first token ends, as prefill has told the door, needs no blocks."""
        request.move(Phase.RUNNING)
        for choice, token_id in zip(request.choices, ready.first_tokens, strict=True):
            if not choice.is_done and choice.append(token_id) is not None:
                self._end_choice(request, choice)
        self._share_prompts(request, ready.position_deltas)
        if request.live_choices:
            self._running.append(request)
        else:
            self._end(request)

    def _share_prompts(self, request: DecodeRequest, position_deltas: Sequence[int]) -> None:
        """The first live choice takes the prompts' blocks. The others share the full ones and copy the last one: from here
        on everybody writes to blocks of his own."""
        block_size = self._blocks.block_size
        copies = request.copy_blocks
        sources: list[int] = []
        targets: list[int] = []
        for prompt, blocks, delta in zip(
            request.request.prompts, request.prompt_blocks, position_deltas, strict=True
        ):
            length = len(prompt.token_ids)
            full = blocks[: length // block_size]
            for i, choice in enumerate(request.live_choices):
                table = list(blocks)
                if i > 0:
                    self._blocks.share(full)
                    table = list(full)
                    if length % block_size:
                        sources.append(blocks[-1])
                        targets.append(copies.pop())
                        table.append(targets[-1])
                choice.branches.append(Branch(length, delta, table))
        if sources:
            self._runner.copy_blocks(sources, targets)
        if request.live_choices:  # the choices own the prompts' blocks now
            request.prompt_blocks = []
        self._blocks.free(copies)  # meant for choices that are over already
        request.copy_blocks = []
        for choice in request.live_choices:
            self._leave_blocks(choice)

    def _with_blocks(self, batch: list[DecodeRequest]) -> list[DecodeRequest]:
        """Those of the batch that have blocks for this step's tokens; newer requests may lose theirs for it."""
        self._runner.propose(batch)
        for request in batch:
            while request.request_id in self._requests and not self._try_grow(request):
                self._preempt(choose_victim(self._running))
        return [request for request in batch if request.request_id in self._requests]

    def _try_grow(self, request: DecodeRequest) -> bool:
        """Blocks for every choice's next token, and for its drafts if there is room."""
        if self._try_cover(request):
            return True
        for choice in request.live_choices:
            choice.drafts = []
        return self._try_cover(request)

    def _try_cover(self, request: DecodeRequest) -> bool:
        block_size = self._blocks.block_size
        tables = [
            (branch.block_table, (choice.context_len(branch) + len(choice.drafts)) // block_size + 1)
            for choice in request.live_choices
            for branch in choice.branches
        ]
        missing = sum(max(0, wanted - len(table)) for table, wanted in tables)
        if missing == 0:
            return True
        fresh = self._blocks.try_allocate(missing)
        if fresh is None:
            return False
        for table, wanted in tables:
            while len(table) < wanted:
                table.append(fresh.pop())
        return True

    def _preempt(self, request: DecodeRequest) -> None:
        self.num_preempted += 1
        self._outbox.send(request.door, Preempted(request.request_id))
        self._let_go(request)

    def _advance(self, request: DecodeRequest, tokens: Sequence[Sequence[int]]) -> None:
        """`tokens`: per live choice."""
        for choice, drawn in zip(request.live_choices, tokens, strict=True):
            finish_reason = None
            first_new = len(choice.token_ids)
            for token_id in drawn:
                finish_reason = choice.append(token_id)
                if finish_reason is not None:
                    break
            new = tuple(choice.token_ids[first_new:])
            event = TokenEvent(request.request_id, new, finish_reason, choice_idx=choice.idx)
            self._outbox.token(request.door, event)
            if finish_reason is None:
                self._leave_blocks(choice)
            else:
                self._end_choice(request, choice)
        if not request.live_choices:
            self._let_go(request)

    def _leave_blocks(self, choice: Choice) -> None:
        """Gives back what no later step of the choice can see. Blocks shared with other choices lose one reference."""
        if self._window is None:
            return
        for branch in choice.branches:
            first_visible = max(0, choice.context_len(branch) + 1 - self._window)
            self._blocks.free(branch.leave(first_visible // self._blocks.block_size))

    def _end_choice(self, request: DecodeRequest, choice: Choice) -> None:
        if choice.is_done:
            return
        choice.is_done = True
        num_sequences = len(request.request.prompts)
        self._num_sequences -= num_sequences
        if request.lease_id:
            self._num_admitted_sequences -= num_sequences
        for branch in choice.branches:
            self._blocks.free(branch.blocks)
        choice.branches = []
        self._runner.forget(choice)

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
        if request.phase is Phase.WAITING:
            self._waiting.remove(request.request_id)
        if request.phase is Phase.CATCHING_UP:
            self._catching_up.remove(request)
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
        self._end(request)

    def _end(self, request: DecodeRequest) -> None:
        for choice in request.live_choices:
            self._end_choice(request, choice)
        for table in (*request.prompt_blocks, request.copy_blocks):
            self._blocks.free(table)
        del self._requests[request.request_id]
        self._on_ended(request.request_id)
