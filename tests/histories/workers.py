"""Worker processes: the product's engines, transfer engines, feature memory and message handling, on
simulated threads, with a chain in place of the model (`tests.histories.model`).

Only what touches the outside is replaced: sockets, threads, the clock, transports, models.

    event loop   messages of doors (`WorkerShell`)
    engine       `LanguageEngine`; of a worker that also encodes, `EncoderEngine` on a thread of its own
    transfer     `TransferEngine`, woken by what lands or arrives and, while a lease is open, every POLL_S
    prepare      makes tensors of media
    tier         copies KV to a slow second tier
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.inbox import Inbox, OwnEmbeddings
from cluster.engine.limits import StepLimits
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.kvcache.tier import KvTier
from cluster.kvcache.tier_slots import HostSlots
from cluster.pulse import LOOK_EVERY_S, SILENT_S
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media_phase import MediaPhase
from cluster.types.members import Member, ProcessId, Role
from cluster.types.messages import StartDecode, StartPrefill
from cluster.worker.shell import WorkerShell
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.service import Encoder
from tests.fakes.kv_rows import KV_LAYOUT
from tests.histories.model import BLOCK_SIZE, STEP_S, TOKEN_S, ChainEncoder, ChainRunner
from tests.histories.processes import Listener, SimulatedParts
from tests.histories.scheduler import SimulatedProcess, SimulatedThread, SkewedClock
from tests.histories.threads import (
    SimulatedExecutor,
    SimulatedTransferEngine,
    ThreadHost,
    TransferTurns,
)

FEATURE_LAYOUT = feature_layout(1, BLOCK_SIZE, torch.int64)
STALLED_S = SILENT_S + LOOK_EVERY_S  # then the doors are told that a thread does not move
POLICY = SchedulingPolicy(aging_s=5.0, tokens_per_s=2000.0, text_share=0.3)


@dataclass(frozen=True)
class Sizes:
    """Of all workers of one history."""

    kv_blocks: int = 24
    feature_blocks: int = 6
    cache_blocks: int = 6
    step_tokens: int = 12
    max_sequences: int = 4
    tier_bytes: int = 0  # of the second tier
    window: int | None = None
    margin_s: float = 2.0
    # Workers that only decode know from the start how long prompts take: then they are given some
    is_warm: bool = False
    runs_ahead: bool = False  # see cluster/engine/ahead.py
    state_blocks: int = 0  # of the state that the model keeps beside its KV
    max_queued_rows: int = 1000

    @property
    def encoder_limits(self) -> EncoderLimits:
        return EncoderLimits(4, 16, 8, 1 << 20, 100, 1 << 20, self.max_queued_rows, 2)


class WorkerHost(ThreadHost):
    """What the world lends to each worker."""

    sizes: Sizes
    has_ended: Callable[[ProcessId], bool]
    make_agent: Callable[[str, SimulatedThread], Any]
    draft: Callable[..., Sequence[bool]]
    is_late: Callable[[], bool]
    hangs: dict[SimulatedProcess, float]
    num_media_at_decode: int  # prompts with media that a worker that does not prefill was to compute
    num_expired: int  # leases that have ended by their time
    num_waited_for: int  # leases on KV blocks that did, and looks at waiting for room for embeddings
    on_foreign: Callable[..., None]  # (worker, memory, request id, blocks)


class SimulatedEncoder(Encoder):
    def __init__(self, worker: SimulatedWorker):
        self.worker = worker
        self.memory = BlockMemory(FEATURE_LAYOUT, worker.host.sizes.cache_blocks)
        self.row_bytes = 8
        self.modalities = ("image", "video", "audio")

    def attach(self, process: Any, own_prompts: OwnEmbeddings | None = None) -> None:
        worker, seat = self.worker, process.encoder_seat
        self.pool = BlockPool(self.memory.num_blocks, BLOCK_SIZE)
        self.cache = EmbeddingCache(self.memory, self.pool)
        runner: Any = ChainEncoder(partial(worker.compute, seat.name))
        self.executor: Any = SimulatedExecutor(worker.host, worker.process, "prepare")
        self.engine = EncoderEngine(
            runner=runner,
            cache=self.cache,
            transfer_engine=process.feature_transfer_engine,
            outbox=seat.outbox,
            clock=worker.clock,
            executor=self.executor,
            limits=worker.host.sizes.encoder_limits,
            policy=POLICY,
            cpu_slots=seat.cpu_slots,
            own_prompts=own_prompts,
        )
        seat.attach(self.engine)
        self.engine.attach(seat.loop)
        self._seat, self._clock = seat, worker.clock


class SimulatedFeatures(FeatureStore):
    """Knows the leases that the worker's own encoder fills: their grants are passed to no writer, and the
    transfer engine has yet to hear that they have ended."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.filled_here: set[str] = set()

    def fill_here(self, lease_id: str) -> None:
        self.filled_here.add(lease_id)
        super().fill_here(lease_id)


class SimulatedLanguage(Inbox):
    def __init__(self, worker: SimulatedWorker, role: Role):
        self.role = role
        self._host, sizes = worker.host, worker.host.sizes
        host = self._host
        self.kv = BlockMemory(KV_LAYOUT, sizes.kv_blocks)
        feature_memory = BlockMemory(FEATURE_LAYOUT, sizes.feature_blocks)
        encoder: Any = SimulatedEncoder(worker) if role.encodes else None
        self.encoder = encoder
        self.parts = process = SimulatedParts(
            worker,
            kv_out=self.kv if role.prefills else None,
            kv_in=self.kv if role.decodes else None,
            features=feature_memory,
            embeddings=None if encoder is None else encoder.memory,
        )
        self.feature_pool = BlockPool(feature_memory.num_blocks, BLOCK_SIZE)
        self.features = self._features = SimulatedFeatures(
            feature_memory, self.feature_pool, process.feature_transfer_engine
        )
        self.pool = BlockPool(sizes.kv_blocks, BLOCK_SIZE)
        runner: Any = ChainRunner(
            self.kv,
            self.features,
            feature_memory,
            partial(worker.compute, "engine"),
            partial(host.on_foreign, worker),
            host.draft,
            host.is_late,
        )
        self._tier = self._make_tier(worker) if sizes.tier_bytes else None
        model: Any = SimpleNamespace(
            positions=lambda prompt: SimpleNamespace(delta=0),
            chunk_cut_spans=False,
            state_blocks=sizes.state_blocks,
            kv_layout=KV_LAYOUT,
            num_layers=1,
            sliding_window=sizes.window if role.decodes else None,
        )
        limits = StepLimits(sizes.step_tokens, sizes.max_sequences if role.decodes else 0, target_s=1.0)
        self.engine = self._engine = LanguageEngine(
            model=model,
            runner=runner,
            blocks=self.pool,
            transfer_engine=process.kv_transfer_engine,
            outbox=process.seat.outbox,
            clock=worker.clock,
            policy=POLICY,
            limits=limits,
            cpu_slots=process.seat.cpu_slots,
            features=self.features,
            tier=self._tier,
            allows_recompute=not sizes.state_blocks,
            runs_ahead=sizes.runs_ahead,
            on_ended=worker.ended.append,
        )
        self.engine.planner.budget.min_tokens = sizes.step_tokens  # however long steps last
        if sizes.is_warm and not role.prefills:
            self.engine.planner.budget.observe(sizes.step_tokens, 0.0, STEP_S + TOKEN_S * sizes.step_tokens)
        super().__init__(role, process, self.engine, self.features, encoder)
        if self._tier is not None:
            self._tier.start(process.loop.call)

    def _start(self, door: int, message: StartPrefill | StartDecode) -> None:
        is_local = isinstance(message, StartDecode) and message.prefills
        if is_local and message.request.prompt.media and not self.role.prefills:
            self._host.num_media_at_decode += 1
        super()._start(door, message)

    def is_short_of_room(self, lease_id: str) -> bool:
        """While this lease on room for embeddings is open, something waits for room."""
        grant = self.parts.feature_transfer_engine.open_grants.get(lease_id)
        if grant is None:
            return False
        is_queued = any(copy.phase is MediaPhase.QUEUED for copy in self.features.copies.values())
        return is_queued or self.feature_pool.num_free < len(grant.block_ids)

    def rows_of(self, request_id: str) -> set[int]:
        """The blocks of feature memory from which the request reads. Room that waits for its embeddings is
        not among them: it may have been given to the request since the word of the late writer came."""
        items = [copy for (name, _), copy in self.features.copies.items() if name == request_id]
        here = [copy for copy in items if copy.phase is MediaPhase.STAGED]
        return {block_id for copy in here for block_id in copy.block_ids}

    def _make_tier(self, worker: SimulatedWorker) -> KvTier:
        executor = SimulatedExecutor(worker.host, worker.process, "tier", is_serial=True)
        levels = [HostSlots(worker.host.sizes.tier_bytes, KV_LAYOUT.block_bytes)]
        return KvTier(
            self.kv, lambda block: self.pool.generations([block])[0], levels, executor, worker.clock
        )


class SimulatedWorker:
    """One incarnation of a worker."""

    def __init__(self, host: WorkerHost, replica_id: str, role: Role, number: int, clock: SkewedClock):
        """`number`: of the incarnation, unique in the history."""
        self.host, self.replica_id, self.role, self.clock = host, replica_id, role, clock
        self.name = f"{replica_id}@{number}"
        self.process = SimulatedProcess(self.name)
        self.process_id = ProcessId("host", 0, number, 0)
        self.ended: list[str] = []  # requests whose answers were to be generated here, once each
        self.late_blocks: dict[BlockMemory, set[int]] = {}  # written late, and the engine is not told yet
        self.event_loop = SimulatedThread(self.process, "loop")
        self._threads: dict[str, SimulatedThread] = {}
        self.transfer_engines: dict[str, SimulatedTransferEngine] = {}  # by agent
        self.granted: dict[tuple[BlockMemory, int, int], str] = {}  # block and generation → the lease
        self.language: SimulatedLanguage | None = None
        if role is Role.ENCODE:
            self.encoder: SimulatedEncoder | None = SimulatedEncoder(self)
            self.parts = SimulatedParts(self, embeddings=self.encoder.memory)
            self.encoder.attach(self.parts)
            self.parts.attach(self.encoder.on_message)
        else:
            self.language = SimulatedLanguage(self, role)
            self.parts, self.encoder = self.language.parts, self.language.encoder

    @property
    def shell(self) -> WorkerShell:
        return self.parts.shell

    @property
    def engines(self) -> list[Any]:
        return [seat.engine for seat in self.parts.seats]

    def works_of(self, engine: Any) -> Iterator[tuple[int, str, str, int | None]]:
        """The door's connection, name, request and item of all that is not over for its door."""
        if isinstance(engine, EncoderEngine):
            for delivery in engine.deliveries:
                yield delivery.door, delivery.key, delivery.request_id, delivery.item_idx
        else:
            for request in engine.requests.values():
                if not request.is_closing:
                    yield request.door, request.request_id, request.request_id, None

    def member(self, overcommit: int = 1) -> Member:
        return Member(
            replica_id=self.replica_id,
            role=self.role,
            address=self.replica_id,
            model="model",
            layout="layout",
            num_blocks=self.host.sizes.cache_blocks
            if self.language is None
            else self.host.sizes.kv_blocks * overcommit,
            modalities=("image", "video", "audio") if self.role.encodes else (),
            block_bytes=KV_LAYOUT.block_bytes,
            state_blocks=0 if self.language is None else self.host.sizes.state_blocks,
            processes=(self.process_id,),
            row_bytes=8 if self.role.encodes else 0,
            process_name=self.name,
        )

    @property
    def open_leases(self) -> list[str]:
        """On memory that others write into."""
        return [lease_id for engine in self.transfer_engines.values() for lease_id in engine.open_grants]

    def pool_of(self, memory: BlockMemory) -> BlockPool:
        """Of a memory that others write into."""
        assert self.language is not None
        return self.language.pool if memory is self.language.kv else self.language.feature_pool

    def thread(self, name: str) -> SimulatedThread:
        return self._threads.setdefault(name, SimulatedThread(self.process, name))

    def listen(self, address: str, name: str, *callbacks: Any, last_read: Any, **_: Any) -> Listener:
        on_connect, on_message, on_close = callbacks
        self.listener = Listener(on_connect, on_message, on_close, last_read)
        return self.listener

    def soon(self, function: Callable[..., None], *args: Any) -> None:
        """On the event loop."""
        self.host.scheduler.after(0.0001, self.event_loop, "", function, *args)

    def compute(self, thread_name: str, seconds: float) -> None:
        hangs_s = self.host.hangs.pop(self.process, 0.0)
        if hangs_s > STALLED_S:
            tell = self.shell.tell_stalled
            self.host.scheduler.after(STALLED_S, self.event_loop, "", tell, (thread_name,))
            self.host.scheduler.after(hangs_s, self.event_loop, "", tell, ())
        self.host.scheduler.pass_time(self.thread(thread_name), seconds + hangs_s)

    def transfer(self, name: str, on_event: Callable[..., None], **memories: Any) -> SimulatedTransferEngine:
        thread = self.thread(name)
        turns, agent = TransferTurns(self.host, thread), self.host.make_agent(f"{self.name}-{name}", thread)
        engine = SimulatedTransferEngine(
            agent,
            self.clock,
            on_event,
            margin_s=self.host.sizes.margin_s,
            has_ended=self.host.has_ended,
            **memories,
        )
        turns.engine, engine.on_wake, agent.wake = engine, turns.wake, turns.wake
        self.transfer_engines[agent.name] = engine
        return engine

    def told_late(self, engine: SimulatedTransferEngine, block_ids: Sequence[int]) -> None:
        """The engine has been told: no request may hold one of these blocks any more."""
        language, memory = self.language, engine.incoming
        assert language is not None and memory is not None
        self.late_blocks.get(memory, set()).difference_update(block_ids)
        for request in language.engine.requests.values():
            held = set(request.held_blocks) if memory is language.kv else language.rows_of(request.request_id)
            late = sorted(held.intersection(block_ids))
            assert request.is_closing or not late, (
                f"{self.name} goes on with {request.request_id} in blocks {late}, which were written late"
            )

    def note(self, what: str) -> None:
        self.host.scheduler.note(self.name, what)
