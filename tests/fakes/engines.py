"""One encoder, one prefill and one decode engine without models, sockets or threads: every hand-over waits in a queue until a
test lets it happen. What runs in place of the models writes recognisable content and checks what it reads, so that a block
reused too early is found: that ends the engine (`bookkeeping`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec, feature_layout
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaItem, Modality
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeTarget,
    EncodeTarget,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
)  # fmt: skip
from cluster.types.request import GenerateRequest, Prompt
from cluster.worker.blame import bookkeeping
from cluster.worker.outbox import Outbox
from cluster.worker.turns import no_turns
from decode_service.engine import DecodeEngine
from decode_service.state import PromptPart
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.runner import Piece, Prepared
from kv_transfer.in_process import InProcessNetwork
from kv_transfer.mover import Mover, MoverFailed
from prefill_service import transfer as prefill_transfer
from prefill_service.engine import PrefillEngine
from prefill_service.features import FeatureStore
from tests.fakes.clock import ManualClock
from tests.fakes.requests import first_token, item_value, kv_value, place

BLOCK_SIZE = 4
TIMEOUT_S, MARGIN_S = 10.0, 2.0
KV_LAYOUT = MemoryLayout((SegmentSpec(BLOCK_SIZE, (1,), torch.int64),))
FEATURE_LAYOUT = feature_layout(1, BLOCK_SIZE, torch.int64)
DOOR = 1
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


class Inbox:
    """Stands for the engine's loop: calls wait until `run`."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        self.calls.append(lambda: function(*args))

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()


class ManualExecutor(Executor):
    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.jobs.append(job)
        return future

    def run_one(self) -> None:
        if self.jobs:
            self.jobs.popleft()()


@dataclass
class Worker:
    """An engine, its mover, and what it has said to the door so far."""

    engine: Any
    mover: Mover
    inbox: Inbox
    outbox: Outbox
    said: deque[AnyMessage] = field(default_factory=deque)

    def step(self) -> None:
        self.inbox.run()
        self.engine.step()

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        self.inbox.call(function, *args)


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
    ):
        """`window`: tokens that decode's model looks back; None: all."""
        self.clock = ManualClock()
        self.network = InProcessNetwork()
        self.executor = ManualExecutor()
        self.mid_step: Callable[[], Any] = lambda: None  # what happens while prefill computes
        self.bad_items: set[str] = set()  # names of items that cannot be decoded
        self.poison: set[str] = set()  # names of items that make every encoder call with them fail
        self.max_call_rows = 1 << 30  # an encoder call with more runs out of memory
        self.encoder_calls: list[list[tuple[str, int, int]]] = []  # (name, first unit, end) of each piece
        self.ended: list[str] = []  # request ids that left decode
        self._kv, self._decode_kv = BlockMemory(KV_LAYOUT, kv_blocks), BlockMemory(KV_LAYOUT, decode_blocks)
        features, rows = (
            BlockMemory(FEATURE_LAYOUT, feature_blocks),
            BlockMemory(FEATURE_LAYOUT, cache_blocks),
        )
        self.pools = {
            "prefill": BlockPool(kv_blocks, BLOCK_SIZE),
            "decode": BlockPool(decode_blocks, BLOCK_SIZE),
            "features": BlockPool(feature_blocks, BLOCK_SIZE),
            "encoder": BlockPool(cache_blocks, BLOCK_SIZE),
        }
        self.cache = EmbeddingCache(rows, self.pools["encoder"])
        runner = SimpleNamespace(prepare=self._prepare, encode=self._encode)
        self.encoder = self._worker("encoder", lambda mover, outbox: EncoderEngine(
            runner, self.cache, mover, outbox, self.clock, self.executor, encoder_limits, encoder_policy,
            no_turns(self.clock)), outgoing=rows)  # fmt: skip
        self.encoder.engine.attach(self.encoder.inbox)

        def prefill(mover: Mover, outbox: Outbox) -> PrefillEngine:
            model = SimpleNamespace(positions=place, chunk_cut_spans=False, kv_layout=KV_LAYOUT, num_layers=1)
            self.features = FeatureStore(features, self.pools["features"], mover)
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
                mover,
                outbox,
                self.clock,
                POLICY,
                StepBudget(1.0, 10, 10),
                no_turns(self.clock),
            )

        self.prefill = self._worker("prefill", prefill, outgoing=self._kv, incoming=features)
        self.decode = self._worker(
            "decode",
            lambda mover, outbox: self._decode_engine(mover, outbox, window),
            incoming=self._decode_kv,
        )
        self.workers = {"encoder": self.encoder, "prefill": self.prefill, "decode": self.decode}

    def _decode_engine(self, mover: Mover, outbox: Outbox, window: int | None) -> DecodeEngine:
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
            runner, self.pools["decode"], mover, outbox, self.clock, POLICY, MAX_BATCH_SEQUENCES,
            self.ended.append, no_turns(self.clock), window, max_stretch_tokens=BLOCK_SIZE,
        )  # fmt: skip

    def _worker(self, name: str, build: Callable[[Mover, Outbox], Any], **memories: BlockMemory) -> Worker:
        inbox = Inbox()
        said: deque[AnyMessage] = deque()
        outbox = Outbox(lambda batch: said.extend(message for _, message in batch))
        outbox.add_door(DOOR)

        def on_event(event: Any) -> None:
            assert not isinstance(event, MoverFailed), event.error
            inbox.call(lambda: worker.engine.on_transfer(event, self.clock.now()))

        mover = Mover(self.network.agent(name), self.clock, on_event, margin_s=MARGIN_S, **memories)
        worker = Worker(build(mover, outbox), mover, inbox, outbox, said)
        return worker

    def receive(self, name: str, message: AnyMessage) -> None:
        """A frame from the door reaches a worker; what `service.py` does with it."""
        worker = self.workers[name]
        engine = worker.engine
        match message:
            case StartPrefill():
                for item_idx, item in enumerate(message.request.prompt.media):
                    key = (message.request.request_id, item_idx)
                    num_rows, tell = item.geometry.num_tokens, worker.said.append
                    self.features.reserve(key, item.media_hash, num_rows, message.timeout_s, tell)
                worker.tell(engine.start, DOOR, message, self.clock.now())
            case StartEncode():
                worker.tell(engine.start, DOOR, message, self.clock.now())
            case StartDecode():
                worker.tell(engine.start, DOOR, message)
            case DecodeTarget():
                engine.offer_target(message.request_id, message.grant)
                worker.tell(engine.take_targets)
            case EncodeTarget():
                worker.tell(engine.set_target, message)
            case Cancel():
                part = {"decode": (message.choice_idx,), "encoder": (message.item_idx,)}.get(name, ())
                worker.tell(engine.cancel, message.request_id, *part)
            case ReturnGrant():
                worker.mover.revoke(message.lease_id, "nobody was given it")

    def launch(
        self, request: GenerateRequest, items: Sequence[MediaItem] = (), stays: bool = False
    ) -> list[tuple[str, AnyMessage]]:
        """What the door sends first: (worker, message). `stays`: decode computes the prompt."""
        if stays:
            return [("decode", StartDecode(request, TIMEOUT_S, prefills=True))]
        encode = [StartEncode(request.request_id, i, item, TIMEOUT_S) for i, item in enumerate(items)]
        return [
            ("prefill", StartPrefill(request, TIMEOUT_S)),
            *(("encoder", m) for m in encode),
        ]

    def turn(self, rounds: int = 1) -> None:
        """Everybody does whatever can be done, `rounds` times."""
        for _ in range(rounds):
            self.executor.run_one()
            for worker in self.workers.values():
                worker.step()
                worker.mover.step()

    @contextmanager
    def cut_ends(self, num_blocks: int) -> Iterator[None]:
        """At most `num_blocks` of a prompt travel, and those of its media; decode computes the others, one in a step."""

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
            assert worker.mover.num_open == 0
            assert worker.mover.agent.num_handles == 0
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
            _check(self._kv, sequence.block_table, prompt, start)
            for position in range(start, end):
                _write(self._kv, sequence.block_table, position, kv_value(prompt, position))
        self.mid_step()
        on_layer(0, None)
        return [torch.empty(0)] * len(batch)

    def compute(self, parts: Sequence[PromptPart]) -> list[tuple[int, ...]]:
        """Decode's, of prompts or their ends: a block in a step."""
        assert 0 < sum(len(part.token_ids) for part in parts) <= BLOCK_SIZE
        for part in parts:
            for position, token_id in enumerate(part.token_ids, part.start):
                _write(self._decode_kv, part.block_table, position, token_id)
        return [tuple(first_token(part.token_ids[-1]) for _ in part.draws) for part in parts]

    def _propose(self, batch: Sequence[Any]) -> None:
        """Nothing is drafted."""

    def _run_decode(self, batch: Sequence[Any]) -> list[list[list[int]]]:
        """Checks every branch's prompt and answer, writes what a model would, says the next number."""
        answer: list[list[list[int]]] = []
        for request in batch:
            for choice in request.live_choices:
                generated = choice.token_ids[choice.num_prompt_tokens :]
                for branch, prompt in zip(choice.branches, request.request.prompts, strict=True):
                    position = choice.context_len(branch)
                    tagged = [1000 * choice.idx + token_id for token_id in generated[:-1]]
                    _check(self._decode_kv, branch.block_table, prompt, branch.num_prompt_tokens, tagged)
                    value = 1000 * choice.idx + generated[-1]
                    _write(self._decode_kv, branch.block_table, position, value)
            answer.append([[choice.token_ids[-1] + 1] for choice in request.live_choices])
        return answer


def _first_tokens(requests: Sequence[Any]) -> list[tuple[int, ...]]:
    tokens: list[tuple[int, ...]] = []
    for request in requests:
        assert request.is_complete
        token_id = first_token(request.main.prompt.token_ids[-1])
        tokens.append((token_id,) * len(request.request.sampling))
    return tokens


def _write(memory: BlockMemory, block_table: Sequence[int], position: int, value: int) -> None:
    memory.segments[0][block_table[position // BLOCK_SIZE], position % BLOCK_SIZE] = value


def _check(
    memory: BlockMemory,
    block_table: Sequence[int],
    prompt: Prompt,
    num_tokens: int,
    behind: Sequence[int] = (),
) -> None:
    found = memory.segments[0][list(block_table)].flatten().tolist()[: num_tokens + len(behind)]
    expected = [kv_value(prompt, position) for position in range(num_tokens)] + list(behind)
    assert found == expected, "foreign KV"
