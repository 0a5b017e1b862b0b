"""One encoder, one prefill and one decode engine without models, sockets or threads: every hand-over waits in a queue until a
test lets it happen. What runs in place of the models writes recognisable content and checks what it reads, so that a block
reused too early is found.
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

from cluster.errors import UnsupportedError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec, feature_layout
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
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
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from cluster.worker.outbox import Outbox
from cluster.worker.turns import no_turns
from decode_service.engine import DecodeEngine
from decode_service.state import PromptPart
from encoder_service.cache import EmbeddingCache
from encoder_service.engine import EncoderEngine, EncoderLimits
from encoder_service.runner import Piece, Prepared
from kv_transfer.in_process import InProcessNetwork
from kv_transfer.mover import Mover, MoverFailed
from prefill_service import transfer as prefill_transfer
from prefill_service.engine import PrefillEngine
from prefill_service.features import FeatureStore
from tests.fakes.clock import ManualClock

BLOCK_SIZE = 4
TIMEOUT_S, MARGIN_S = 10.0, 2.0
KV_LAYOUT = MemoryLayout((SegmentSpec(BLOCK_SIZE, (1,), torch.int64),))
FEATURE_LAYOUT = feature_layout(1, BLOCK_SIZE, torch.int64)
DOOR = 1
POLICY = SchedulingPolicy(aging_s=5.0, tokens_per_s=1e9, text_share=0.5)
FIRST_TOKEN = 50  # what prefill draws behind an original prompt; each later token is one more
UNPLACEABLE_TOKEN = 7
LAST_PROMPT_TOKEN = 40


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


def make_item(name: str, num_rows: int) -> MediaItem:
    return MediaItem(Modality.IMAGE, name.encode(), name, MediaGeometry(num_rows))


def make_video(name: str, num_frames: int, rows_per_frame: int = 2) -> MediaItem:
    """Can be cut between its frames."""
    geometry = MediaGeometry(num_frames * rows_per_frame, (num_frames, 2, 2 * rows_per_frame))
    return MediaItem(Modality.VIDEO, name.encode(), name, geometry)


def make_request(
    request_id: str,
    num_tokens: int,
    items: Sequence[MediaItem] = (),
    max_tokens: int = 4,
    stop: tuple[int, ...] = (),
    num_choices: int = 1,
    negative: int = 0,
    is_split: bool = False,
) -> GenerateRequest:
    """`num_tokens` of text, an item behind every third of them; `negative`: tokens of a companion's prompt; `is_split`: a token of
    text stands behind each item's first row."""
    token_ids: list[int] = []
    media: list[PlacedMedia] = []
    left = deque(items)
    for position in range(num_tokens):
        token_ids.append(100 + position)
        if (left and position % 3 == 2) or (left and position == num_tokens - 1):
            while left:
                item = left.popleft()
                num_rows, offset = item.geometry.num_tokens, len(token_ids)
                ranges = ((offset, 1), (offset + 2, num_rows - 1)) if is_split else ((offset, num_rows),)
                media.append(PlacedMedia(item.modality, item.media_hash, ranges, item.geometry))
                token_ids += [9, 8, *[9] * (num_rows - 1)] if is_split else [9] * num_rows
                if position < num_tokens - 1:
                    break
    token_ids.append(LAST_PROMPT_TOKEN)
    prompt = Prompt(tuple(token_ids), tuple(media))
    guidance = Guidance(2.0, Prompt(tuple(range(300, 300 + negative)))) if negative else None
    sampling = (SamplingParams(),) * num_choices
    return GenerateRequest(request_id, prompt, sampling, StopParams(max_tokens, stop), guidance)


def place(prompt: Prompt) -> SimpleNamespace:
    """What the model says of a prompt's positions; some families cannot place every prompt."""
    if prompt.token_ids[0] == UNPLACEABLE_TOKEN:
        raise UnsupportedError("this prompt has no positions")
    return SimpleNamespace(delta=0)


def item_value(media_hash: str, row: int = 0) -> int:
    """What an embedding row of an item holds."""
    return 1000 + sum(media_hash.encode()) + 10_000 * row


def kv_value(prompt: Prompt, position: int) -> int:
    """What the KV of a prompt token holds."""
    for item in prompt.media:
        for _, row, _ in item.pieces(position, position + 1):
            return item_value(item.media_hash, row)
    return prompt.token_ids[position]


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
    ):
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
            runner = SimpleNamespace(run=self._run_prefill, first_tokens=_first_tokens)
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
        decode_runner = SimpleNamespace(
            run=self._run_decode,
            propose=lambda batch: None,
            forget=lambda choice: None,
            copy_blocks=self._decode_kv.copy_blocks,
            compute=self.compute,
            num_drafted=0,
            num_accepted=0,
        )
        self.decode = self._worker("decode", lambda mover, outbox: DecodeEngine(
            decode_runner, self.pools["decode"], mover, outbox, self.clock, POLICY, 2,
            self.ended.append, no_turns(self.clock), max_stretch_tokens=BLOCK_SIZE),
            incoming=self._decode_kv)  # fmt: skip
        self.workers = {"encoder": self.encoder, "prefill": self.prefill, "decode": self.decode}

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

    def _prepare(self, item: MediaItem) -> Prepared:
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
        return [tuple(_first_token(part.token_ids[-1]) for _ in part.draws) for part in parts]

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
        token_id = _first_token(request.main.prompt.token_ids[-1])
        tokens.append((token_id,) * len(request.request.sampling))
    return tokens


def _first_token(last: int) -> int:
    """Behind a prompt that ends so. A resumed request goes on counting where its first attempt stopped."""
    return FIRST_TOKEN if last == LAST_PROMPT_TOKEN else last + 1


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
