"""One encoder, one prefill and one decode engine without models, sockets or threads: every hand-over waits in
a queue until a test lets it happen. What runs in place of the models writes recognisable content and checks
what it reads, so that a block reused too early is found: that ends the engine (`bookkeeping`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaItem, Modality
from cluster.types.members import ProcessId
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeTarget,
    EncoderLost,
    EncodeTarget,
    GrantPassed,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
)  # fmt: skip
from cluster.worker.blame import bookkeeping
from cluster.worker.cpu_slots import no_cpu_slots
from cluster.worker.outbox import Outbox
from decode_service.engine import DecodeEngine
from decode_service.speculation import accept
from decode_service.state import PromptPart
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.runner import Piece, Prepared
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import TransferEngineFailed
from kv_transfer.lease.transfer_engine import TransferEngine
from prefill_service import transfer as prefill_transfer
from prefill_service.engine import PrefillEngine
from prefill_service.features import FeatureStore
from tests.fakes.clock import ManualClock
from tests.fakes.kv_rows import BLOCK_SIZE, CODED_KV_LAYOUT, KV_LAYOUT, check_tokens, write_token
from tests.fakes.requests import first_token, item_value, kv_value, place
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
    ):
        """`window`: tokens that decode's model looks back; None: all. `step_tokens`: of a prefill step."""
        self.clock = ManualClock()
        self.network = InProcessNetwork()
        self.executor = ManualExecutor()
        self.mid_step: Callable[[], Any] = lambda: None  # what happens while prefill computes
        self.mid_call: Callable[[], Any] = lambda: None  # … while the encoder does
        self.mid_decode: Callable[[], Any] = lambda: None  # … while decode does
        self.bad_items: set[str] = set()  # names of items that cannot be decoded
        self.poison: set[str] = set()  # names of items that make every encoder call with them fail
        self.max_call_rows = 1 << 30  # an encoder call with more runs out of memory
        self.encoder_calls: list[list[tuple[str, int, int]]] = []  # (name, first unit, end) of each piece
        self.ended: list[str] = []  # request ids that left decode
        self.codec = codec
        self.draft: Callable[[Any], list[int]] = lambda choice: []  # decode's guesses at what follows
        self.ended_processes: set[ProcessId] = set()
        self._num_processes = 0
        self._sizes = {
            "prefill": kv_blocks,
            "decode": decode_blocks,
            "features": feature_blocks,
            "encoder": cache_blocks,
        }
        self._encoder_settings = (encoder_limits, encoder_policy)
        self._window, self._step_tokens = window, step_tokens
        self.pools: dict[str, BlockPool] = {}
        self.workers: dict[str, Worker] = {}
        for name in ("encoder", "prefill", "decode"):
            self.start_worker(name)

    @property
    def encoder(self) -> Worker:
        return self.workers["encoder"]

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
            self.workers[name].transfer_engine.agent.close()
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
        runner = SimpleNamespace(prepare=self._prepare, encode=self._encode)
        limits, policy = self._encoder_settings
        self._add_worker("encoder", lambda transfer_engine, outbox: EncoderEngine(
            runner, self.cache, transfer_engine, outbox, self.clock, self.executor, limits, policy,
            no_cpu_slots(self.clock)), outgoing=rows)  # fmt: skip
        self.encoder.engine.attach(self.encoder.inbox)

    def _kv_memory(self, name: str) -> tuple[BlockMemory, Wire | None]:
        if self.codec == "raw":
            return BlockMemory(KV_LAYOUT, self._sizes[name]), None
        memory = BlockMemory(CODED_KV_LAYOUT, self._sizes[name])
        return memory, Wire(memory, self.codec, self._sizes[name] * BLOCK_SIZE)

    def _start_prefill(self) -> None:
        self._kv, wire = self._kv_memory("prefill")
        features = BlockMemory(FEATURE_LAYOUT, self._sizes["features"])
        self.pools["features"] = BlockPool(self._sizes["features"], BLOCK_SIZE)

        def prefill(transfer_engine: TransferEngine, outbox: Outbox) -> PrefillEngine:
            layout = self._kv.layout
            model = SimpleNamespace(positions=place, chunk_cut_spans=False, kv_layout=layout, num_layers=1)
            self.features = FeatureStore(features, self.pools["features"], transfer_engine)
            runner = SimpleNamespace(
                run=bookkeeping(self._run_prefill),
                first_tokens=bookkeeping(_first_tokens),
                warm_up=lambda *_: None,
            )
            return PrefillEngine(
                model,
                runner,
                self.pools["prefill"],
                self.features,
                transfer_engine,
                outbox,
                self.clock,
                POLICY,
                StepBudget(1.0, self._step_tokens, self._step_tokens),
                no_cpu_slots(self.clock),
            )

        self._add_worker("prefill", prefill, outgoing=self._kv, outgoing_wire=wire, incoming=features)

    def _start_decode(self) -> None:
        self._decode_kv, wire = self._kv_memory("decode")
        self._add_worker("decode", self._decode_engine, incoming=self._decode_kv, incoming_wire=wire)

    def _decode_engine(self, transfer_engine: TransferEngine, outbox: Outbox) -> DecodeEngine:
        runner = SimpleNamespace(
            run=bookkeeping(self._run_decode),
            propose=self._propose,
            forget=lambda choice: None,
            copy_blocks=self._decode_kv.copy_blocks,
            compute=bookkeeping(self.compute),
            warm_up=lambda *_: None,
            num_drafted=0,
            num_accepted=0,
        )
        return DecodeEngine(
            runner, self.pools["decode"], transfer_engine, outbox, self.clock, POLICY, MAX_BATCH_SEQUENCES,
            self.ended.append, no_cpu_slots(self.clock), self._window, max_local_prefill_tokens=BLOCK_SIZE,
        )  # fmt: skip

    def _add_worker(self, name: str, build: Callable[[TransferEngine, Outbox], Any], **memories: Any) -> None:
        self._num_processes += 1
        agent_name = name if name not in self.workers else f"{name}-{self._num_processes}"
        inbox = Inbox()
        said: deque[AnyMessage] = deque()
        outbox = Outbox(lambda batch: said.extend(message for _, message in batch))
        outbox.add_door(DOOR)

        def on_event(event: Any) -> None:
            assert not isinstance(event, TransferEngineFailed), event.error
            inbox.call(lambda: worker.engine.on_transfer(event, self.clock.now()))

        transfer_engine = TransferEngine(
            self.network.agent(agent_name),
            self.clock,
            on_event,
            margin_s=MARGIN_S,
            has_ended=self.ended_processes.__contains__,
            **memories,
        )
        process = ProcessId("rig", 0, self._num_processes, 0)
        self.workers[name] = worker = Worker(
            build(transfer_engine, outbox), transfer_engine, inbox, outbox, process, said
        )

    def receive(self, name: str, message: AnyMessage) -> None:
        """A frame from the door reaches a worker; what `service.py` does with it."""
        worker = self.workers[name]
        engine = worker.engine
        match message:
            case StartPrefill():
                for item_idx, item in enumerate(message.request.prompt.media):
                    key = (message.request.request_id, item_idx)
                    num_rows, tell = item.geometry.num_tokens, partial(self._say, worker, worker.door)
                    self.features.reserve(key, item.media_hash, num_rows, message.timeout_s, tell)
                worker.tell(engine.start, worker.door, message, self.clock.now())
            case StartEncode():
                worker.tell(engine.start, worker.door, message, self.clock.now())
            case StartDecode():
                worker.tell(engine.start, worker.door, message)
            case DecodeTarget():
                engine.offer_target(message.request_id, message.grant.received(self.clock.now()))
                worker.tell(engine.take_targets)
            case EncodeTarget():
                received = message.grant.received(self.clock.now())
                worker.tell(engine.set_target, message.request_id, message.item_idx, received)
            case Cancel():
                part = {"decode": (message.choice_idx,), "encoder": (message.item_idx,)}.get(name, ())
                worker.tell(engine.cancel, message.request_id, *part)
            case EncoderLost():
                self.features.renew((message.request_id, message.item_idx), message.lease_id)
            case GrantPassed():
                worker.transfer_engine.note_writer(message.lease_id, message.processes)
            case ReturnGrant():
                worker.transfer_engine.revoke(message.lease_id, "no writer was given it")

    @staticmethod
    def _say(worker: Worker, door: int, message: AnyMessage) -> None:
        if door == worker.door:
            worker.said.append(message)

    def turn(self, rounds: int = 1) -> None:
        """Everybody does whatever can be done, `rounds` times."""
        for _ in range(rounds):
            self.executor.run_one()
            for worker in self.workers.values():
                worker.step()
                worker.transfer_engine.step()

    @contextmanager
    def cut_ends(self, num_blocks: int) -> Iterator[None]:
        """At most `num_blocks` of a prompt travel, and those of its media; decode computes the others, one in
        a step."""

        def plan_end(request: Any, *_: Any) -> None:
            media_end = max((item.end for item in request.main.prompt.media), default=0)
            cut = max(num_blocks, -(-media_end // BLOCK_SIZE)) * BLOCK_SIZE
            if cut < request.main.num_tokens:
                request.main.first_recomputed = cut

        with patch.object(prefill_transfer, "plan_end", plan_end):
            yield

    def audit(self) -> None:
        for worker in self.workers.values():
            worker.inbox.run()
            load = worker.engine.load()
            assert load.is_idle, load
            assert worker.transfer_engine.num_open == 0
            assert worker.transfer_engine.agent.num_handles == 0
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

    def _run_prefill(
        self, batch: Sequence[tuple[Any, Any, int]], on_layer: Callable[[int, Any], None]
    ) -> list[torch.Tensor]:
        for request, sequence, count in batch:
            prompt = sequence.prompt
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            for item_idx, item in enumerate(prompt.media):
                for _, row, count in item.pieces(start, end):
                    rows = self.features.rows((request.request_id, item_idx), row, row + count)
                    expected = [item_value(item.media_hash, i) for i in range(row, row + count)]
                    assert torch.cat(rows).flatten().tolist() == expected
            check_tokens(self._kv, sequence.block_table, prompt, start)
            for position in range(start, end):
                write_token(self._kv, sequence.block_table, position, kv_value(prompt, position))
        self.mid_step()
        on_layer(0, None)
        return [torch.empty(0)] * len(batch)

    def compute(self, parts: Sequence[PromptPart]) -> list[tuple[int, ...]]:
        """Decode's, of prompts or their ends: a block in a step."""
        assert 0 < sum(len(part.token_ids) for part in parts) <= BLOCK_SIZE
        for part in parts:
            for position, token_id in enumerate(part.token_ids, part.start):
                write_token(self._decode_kv, part.block_table, position, token_id)
        return [tuple(first_token(part.token_ids[-1]) for _ in part.draws) for part in parts]

    def _propose(self, batch: Sequence[Any]) -> None:
        for request in batch:
            for choice in request.live_choices if request.request.guidance is None else ():
                room = choice.stop.max_tokens - choice.num_generated - 1
                choice.drafts = self.draft(choice)[:room]

    def _run_decode(self, batch: Sequence[Any]) -> list[list[list[int]]]:
        """Checks every branch's prompt and answer, writes what a model would, says the next number."""
        answer: list[list[list[int]]] = []
        self.mid_decode()
        for request in batch:
            answer.append([])
            for choice in request.live_choices:
                generated = choice.token_ids[choice.num_prompt_tokens :]
                for branch, prompt in zip(choice.branches, request.request.prompts, strict=True):
                    position = choice.context_len(branch)
                    tagged = [1000 * choice.idx + token_id for token_id in generated[:-1]]
                    check_tokens(
                        self._decode_kv, branch.block_table, prompt, branch.num_prompt_tokens, tagged
                    )
                    for i, token_id in enumerate((generated[-1], *choice.drafts)):
                        value = 1000 * choice.idx + token_id
                        write_token(self._decode_kv, branch.block_table, position + i, value)
                drawn = [token_id + 1 for token_id in (choice.token_ids[-1], *choice.drafts)]
                answer[-1].append(accept(choice.drafts, drawn))
                choice.drafts = []
        return answer


def _first_tokens(requests: Sequence[Any]) -> list[tuple[int, ...]]:
    tokens: list[tuple[int, ...]] = []
    for request in requests:
        assert request.is_complete
        token_id = first_token(request.main.prompt.token_ids[-1])
        tokens.append((token_id,) * len(request.request.sampling))
    return tokens
