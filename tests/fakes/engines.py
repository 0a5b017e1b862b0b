"""One encoder, one prefill and one decode engine without models, sockets or threads: every hand-over waits in
a queue until a test lets it happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch

from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.inbox import Inbox as MessageInbox
from cluster.engine.limits import StepLimits
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.kvcache.tier import KvTier
from cluster.kvcache.tier_slots import Slots
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaItem, Modality
from cluster.types.members import ProcessId, Role
from cluster.types.messages import AnyMessage
from cluster.worker.cpu_slots import no_cpu_slots
from cluster.worker.outbox import Outbox
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.runner import Piece, Prepared
from encoder_service.service import Encoder
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import TransferEngineFailed
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.clock import ManualClock
from tests.fakes.kv_rows import BLOCK_SIZE, CODED_KV_LAYOUT, KV_LAYOUT
from tests.fakes.language_runner import ScriptedRunner
from tests.fakes.requests import item_value, place
from tests.fakes.workers import DOOR, Inbox, ManualExecutor, Worker

TIMEOUT_S, MARGIN_S = 10.0, 2.0
FEATURE_LAYOUT = feature_layout(1, BLOCK_SIZE, torch.int64)
POLICY = SchedulingPolicy(aging_s=5.0, tokens_per_s=1e9, text_share=0.5)
MAX_BATCH_SEQUENCES = 2  # of a decode step
ENCODER_LIMITS = EncoderLimits(
    max_batch_items=4,
    max_batch_rows=16,
    max_piece_rows=8,
    max_call_bytes=1 << 20,
    row_bytes=100,
    max_prepared_bytes=1 << 20,
    max_queued_rows=1000,
    num_prepare_threads=2,
)


class RigEncoder(Encoder):
    """Passes messages to an engine that is there."""

    def __init__(self, engine: EncoderEngine, parts: Any):
        self.engine, self._seat, self._clock = engine, parts.seat, parts.clock


class Rig:
    def __init__(
        self,
        kv_blocks: int = 24,
        decode_blocks: int = 24,
        feature_blocks: int = 6,
        cache_blocks: int = 6,
        encoder_limits: EncoderLimits = ENCODER_LIMITS,
        encoder_policy: SchedulingPolicy = POLICY,
        window: int | None = None,
        codec: Literal["raw", "int8"] = "raw",
        step_tokens: int = 10,
        tier_levels: Sequence[Slots] = (),
        cpu_slots: Any = None,
        runs_ahead: bool = False,
        state_blocks: int = 0,
    ):
        """`window`: tokens that decode's model looks back; None: all. `step_tokens`: of a prefill step.
        `tier_levels`: where prefill keeps what its cache loses. `feature_blocks`: prefill's and decode's.
        `cpu_slots`, `runs_ahead`, `state_blocks`: of the language engines."""
        self.clock = ManualClock()
        self.network = InProcessNetwork()
        self.executor = ManualExecutor()
        self.mid_step: Callable[[], Any] = lambda: None  # what happens while prefill computes
        self.mid_call: Callable[[], Any] = lambda: None  # … while the encoder does
        self.mid_decode: Callable[[], Any] = lambda: None  # … while decode generates
        self.mid_local_prefill: Callable[[], Any] = lambda: None  # … while it computes a prompt
        self.bad_items: set[str] = set()  # names of items that cannot be decoded
        self.poison: set[str] = set()  # names of items that make every encoder call with them fail
        self.max_call_rows = 1 << 30  # an encoder call with more runs out of memory
        self.encoder_calls: list[list[tuple[str, int, int]]] = []  # (name, first unit, end) of each piece
        self.ended: list[str] = []  # request ids that left decode
        self.codec: Literal["raw", "int8"] = codec
        self.draft: Callable[[Any], list[int]] = lambda choice: []  # decode's guesses at what follows
        self.ended_processes: set[ProcessId] = set()
        self._num_processes = 0
        self._sizes = {
            "prefill": kv_blocks,
            "decode": decode_blocks,
            "encoder": cache_blocks,
        }
        self._num_feature_blocks = feature_blocks
        self._encoder_settings = (encoder_limits, encoder_policy)
        self._window, self._step_tokens = window, step_tokens
        self.tier_executor = ManualExecutor()
        self.tier_levels = tier_levels
        self.pools: dict[str, BlockPool] = {}
        self.workers: dict[str, Worker] = {}
        self.runners: dict[str, Any] = {}  # in place of the models
        self.models: dict[str, Any] = {}  # what engines ask of theirs
        self._cpu_slots, self._runs_ahead, self._state_blocks = cpu_slots, runs_ahead, state_blocks
        for name in ("encoder", "prefill", "decode"):
            self.start_worker(name)

    @property
    def encoder(self) -> Worker:
        return self.workers["encoder"]

    @property
    def features(self) -> FeatureStore:
        """Prefill's."""
        features = self.prefill.features
        assert features is not None
        return features

    @property
    def prefill(self) -> Worker:
        return self.workers["prefill"]

    @property
    def decode(self) -> Worker:
        return self.workers["decode"]

    def start_worker(self, name: str) -> None:
        """A process with memories of its own. One that had the name is killed."""
        if name in self.workers:
            self.ended_processes.add(self.workers[name].process)
            for transfer_engine in self.workers[name].transfer_engines:
                transfer_engine.agent.close()
        self.pools[name] = BlockPool(self._sizes[name], BLOCK_SIZE)
        {"encoder": self._start_encoder, "prefill": self._start_prefill, "decode": self._start_decode}[name]()

    def reconnect(self, name: str) -> None:
        """The door's connection to a worker breaks and is made again."""
        worker = self.workers[name]
        worker.said.clear()
        old, worker.door = worker.door, worker.door + 1
        worker.tell(worker.engine.drop_door, old)
        worker.tell(worker.outbox.remove_door, old)
        worker.tell(worker.outbox.add_door, worker.door)

    def _start_encoder(self) -> None:
        rows = BlockMemory(FEATURE_LAYOUT, self._sizes["encoder"])
        self.cache = EmbeddingCache(rows, self.pools["encoder"])
        runner: Any = SimpleNamespace(prepare=self._prepare, encode=self._encode, record_next=lambda: False)
        self.runners["encoder"] = runner
        limits, policy = self._encoder_settings
        self._add_worker(
            "encoder",
            lambda transfer_engine, outbox, features: EncoderEngine(
                runner=runner,
                cache=self.cache,
                transfer_engine=transfer_engine,
                outbox=outbox,
                clock=self.clock,
                executor=self.executor,
                limits=limits,
                policy=policy,
                cpu_slots=no_cpu_slots(self.clock),
            ),
            outgoing=rows,
        )
        self.encoder.engine.attach(self.encoder.inbox)

    def _kv_memory(self, name: str) -> tuple[BlockMemory, Wire | None]:
        if self.codec == "raw":
            return BlockMemory(KV_LAYOUT, self._sizes[name]), None
        memory = BlockMemory(CODED_KV_LAYOUT, self._sizes[name])
        return memory, Wire(memory, self.codec, self._sizes[name] * BLOCK_SIZE)

    def _start_prefill(self) -> None:
        self._kv, wire = self._kv_memory("prefill")

        def prefill(
            transfer_engine: TransferEngine, outbox: Outbox, features: FeatureStore
        ) -> LanguageEngine:
            runner = ScriptedRunner(self._kv, features, on_prompts=lambda: self.mid_step())
            limits = StepLimits(self._step_tokens, max_sequences=0, target_s=1.0)
            engine = self._language_engine("prefill", runner, limits, transfer_engine, outbox, features, tier)
            engine.planner.budget.min_tokens = self._step_tokens  # however long steps last
            return engine

        tier = self._make_tier() if self.tier_levels else None
        self._add_worker("prefill", prefill, outgoing=self._kv, outgoing_wire=wire)
        if tier is not None:
            tier.start(self.prefill.inbox.call)

    def _make_tier(self) -> KvTier:
        def generation_of(block_id: int) -> int:
            return self.pools["prefill"].generations([block_id])[0]

        return KvTier(self._kv, generation_of, self.tier_levels, self.tier_executor, self.clock)

    def _start_decode(self) -> None:
        self._decode_kv, wire = self._kv_memory("decode")

        def decode(transfer_engine: TransferEngine, outbox: Outbox, features: FeatureStore) -> LanguageEngine:
            runner = self._decode_runner(features)
            limits = StepLimits(BLOCK_SIZE, MAX_BATCH_SEQUENCES, target_s=1.0)
            return self._language_engine("decode", runner, limits, transfer_engine, outbox, features)

        self._add_worker("decode", decode, incoming=self._decode_kv, incoming_wire=wire)

    def _decode_runner(self, features: FeatureStore) -> ScriptedRunner:
        return ScriptedRunner(
            self._decode_kv,
            features,
            on_prompts=lambda: self.mid_local_prefill(),
            on_answers=lambda: self.mid_decode(),
            draft=lambda choice: self.draft(choice),
        )

    def _language_engine(
        self,
        name: str,
        runner: Any,
        limits: StepLimits,
        transfer_engine: TransferEngine,
        outbox: Outbox,
        features: FeatureStore,
        tier: KvTier | None = None,
    ) -> LanguageEngine:
        model: Any = SimpleNamespace(
            positions=place,
            chunk_cut_spans=False,
            state_blocks=self._state_blocks,
            kv_layout=runner.kv.layout,
            num_layers=1,
            sliding_window=self._window if limits.max_sequences else None,
        )
        self.runners[name], self.models[name] = runner, model
        return LanguageEngine(
            model=model,
            runner=runner,
            blocks=self.pools[name],
            transfer_engine=transfer_engine,
            outbox=outbox,
            clock=self.clock,
            policy=POLICY,
            limits=limits,
            cpu_slots=self._cpu_slots or no_cpu_slots(self.clock),
            features=features,
            tier=tier,
            runs_ahead=self._runs_ahead,
            on_ended=self.ended.append,
        )

    def _add_worker(self, name: str, build: Callable[..., Any], **memories: Any) -> None:
        """`build(transfer_engine, outbox, features)`: its engine."""
        self._num_processes += 1
        agent_name = name if name not in self.workers else f"{name}-{self._num_processes}"
        inbox = Inbox()

        def deliver(batch: Any) -> None:
            for _, message in batch:
                worker.say(message)

        outbox = Outbox(deliver)
        outbox.add_door(DOOR)

        def on_event(hear: str, event: Any) -> None:
            assert not isinstance(event, TransferEngineFailed), event.error
            at = self.clock.now()
            inbox.call(lambda: getattr(worker.engine, hear)(event, at))

        def transfer(agent_name: str, hear: str, **memories: Any) -> TransferEngine:
            agent, has_ended = self.network.agent(agent_name), self.ended_processes.__contains__
            tell = partial(on_event, hear)
            return TransferEngine(agent, self.clock, tell, margin_s=MARGIN_S, has_ended=has_ended, **memories)

        transfer_engine = feature_transfer_engine = transfer(agent_name, "on_transfer", **memories)
        features = None
        if name != "encoder":
            rows = BlockMemory(FEATURE_LAYOUT, self._num_feature_blocks)
            feature_transfer_engine = transfer(f"{agent_name}-features", "on_features", incoming=rows)
            pool = self.pools[f"{name}-features"] = BlockPool(self._num_feature_blocks, BLOCK_SIZE)
            features = FeatureStore(rows, pool, feature_transfer_engine)
        process = ProcessId("rig", 0, self._num_processes, 0)
        self.workers[name] = worker = Worker(
            build(transfer_engine, outbox, features),
            transfer_engine,
            feature_transfer_engine,
            features,
            inbox,
            outbox,
            process,
        )
        parts: Any = SimpleNamespace(
            clock=self.clock,
            loop=inbox,
            seat=SimpleNamespace(attach=lambda engine: None, loop=inbox),
            shell=worker,
            kv_transfer_engine=transfer_engine,
            feature_transfer_engine=feature_transfer_engine,
            attach=worker.attach,
        )
        if features is None:
            worker.attach(RigEncoder(worker.engine, parts).on_message)
        else:
            MessageInbox(Role(name), parts, worker.engine, features)

    def receive(self, name: str, message: AnyMessage) -> None:
        """A frame from the door reaches a worker."""
        worker = self.workers[name]
        worker.on_message(worker.door, message)

    def turn(self, rounds: int = 1) -> None:
        """Everybody does whatever can be done, `rounds` times."""
        for _ in range(rounds):
            self.executor.run_one()
            self.tier_executor.run_one()
            for worker in self.workers.values():
                worker.step()
                for transfer_engine in worker.transfer_engines:
                    transfer_engine.step()

    def audit(self) -> None:
        for worker in self.workers.values():
            worker.inbox.run()
            load = worker.engine.load()
            assert load.is_idle, load
            for transfer_engine in worker.transfer_engines:
                assert transfer_engine.num_open == 0
                agent: Any = transfer_engine.agent
                assert not agent.handles
        for name, pool in self.pools.items():
            pool.check_integrity()
            if name != "encoder":  # its cache holds references while it keeps rows
                assert pool.num_referenced == 0, name
        assert self.cache.num_held_blocks == 0
        assert self.cache.num_cached_blocks == self.pools["encoder"].num_referenced

    def _prepare(self, item: MediaItem, _: Any = None) -> Prepared:
        if item.media_hash in self.bad_items:
            raise ValueError("this item cannot be decoded")
        grid = item.geometry.grid_thw
        rows = torch.tensor([[item_value(item.media_hash, i)] for i in range(item.geometry.num_tokens)])
        return Prepared({item.media_hash: rows}, 1 if grid is None else grid[0])

    def _encode(self, _: Modality, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        names = [next(iter(piece.prepared.tensors)) for piece in pieces]
        self.encoder_calls.append(
            [(name, piece.start, piece.end) for name, piece in zip(names, pieces, strict=True)]
        )
        outputs = []
        for name, piece in zip(names, pieces, strict=True):
            rows, num_units = piece.prepared.tensors[name], piece.prepared.num_units
            outputs.append(rows[piece.start * len(rows) // num_units : piece.end * len(rows) // num_units])
        if sum(map(len, outputs)) > self.max_call_rows:
            raise torch.OutOfMemoryError("out of memory")
        self.mid_call()
        if self.poison.intersection(names):
            raise RuntimeError("the encoder stumbles")
        return outputs
