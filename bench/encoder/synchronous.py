"""The baseline of `mixed`: a server that encodes in its step. One process, one model copy, one queue, first
come first served.

It has the cluster's own API, door, kernels and preprocessing threads; only the order of work differs. A step
takes requests in order of arrival until `prefill.max_batch_tokens` are full, encodes the media of those that
are new in it, and then runs their tokens in one forward, a long prompt over several steps. Nothing runs
with an encoder call, so all requests in that step and after it wait for it. Every answer is one token:
there is no decode.

The engine's thread owns the reading end of the queue, both halves of the model and the KV; the door's event
loop puts requests in.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import uvicorn
from torch import Tensor

from bench.trusted_media import trusted_decoders
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError, RequestError, from_info, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.media.processor import MediaProcessor
from cluster.model.changes import forbid
from cluster.model.encoder import EncoderModel
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.types.media import MediaItem
from cluster.types.members import Phase
from cluster.types.messages import FinishReason, TokenEvent
from cluster.types.request import GenerateRequest
from encoder_service.runner import EncoderRunner, Piece, Prepared
from router.api.app import build_api
from router.door import Door
from router.flow.state import ClientRequest


@dataclass(eq=False)
class QueuedRequest:
    """One request, from its arrival to its token."""

    request: GenerateRequest
    items: Sequence[MediaItem]
    tensors: Sequence[Future[Prepared]]  # per item, from the preprocessing threads
    token: asyncio.Future[int]
    loop: asyncio.AbstractEventLoop
    rows: list[Tensor] = field(default_factory=list)  # per item, once encoded
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_missing(self) -> int:
        return len(self.request.prompt.token_ids) - self.num_computed


def fill_step(missing: Sequence[int], max_tokens: int) -> list[int]:
    """How many tokens of each of the first requests the step computes, in order; `max_tokens` in all."""
    counts: list[int] = []
    for num_tokens in missing:
        room = max_tokens - sum(counts)
        if room == 0:
            break
        counts.append(min(num_tokens, room))
    return counts


class SynchronousEngine:
    """Replaces the door's dispatcher."""

    def __init__(self, args: ClusterArgs, dtype: torch.dtype):
        """Loads the model; blocks. Raises ConfigError."""
        processor = MediaProcessor.load(args.model)
        if processor is None:
            raise ConfigError(f"{args.model} has no media encoder")
        self._encoder = EncoderRunner(
            EncoderModel.load(args.model, dtype=dtype), processor, trusted_decoders()
        )
        self._model = LanguageModel.load(args.model, dtype=dtype, block_size=args.block_size)
        self._kv = BlockMemory(self._model.kv_layout, args.cpu_kv_blocks[Phase.PREFILL])
        self._blocks = BlockPool(args.cpu_kv_blocks[Phase.PREFILL], args.block_size)
        self._max_tokens = args.prefill.max_batch_tokens
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._arrived: queue.SimpleQueue[QueuedRequest] = queue.SimpleQueue()
        self._waiting: list[QueuedRequest] = []
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def generate(self, client: ClientRequest) -> list[OneToken]:
        """Called on the event loop."""
        request, items = client.request, client.items
        if request.stop.max_tokens != 1 or len(request.sampling) != 1 or request.guidance is not None:
            raise RequestError("the baseline answers with one greedy token")
        loop = asyncio.get_running_loop()
        tensors = [self._executor.submit(self._encoder.prepare, item) for item in items]
        waiting = QueuedRequest(request, items, tensors, loop.create_future(), loop)
        self._arrived.put(waiting)
        return [OneToken(request.request_id, waiting.token)]

    def _run(self) -> None:
        while True:
            if not self._waiting:
                self._waiting.append(self._arrived.get())
            while not self._arrived.empty():
                self._waiting.append(self._arrived.get())
            counts = fill_step([waiting.num_missing for waiting in self._waiting], self._max_tokens)
            batch = self._waiting[: len(counts)]
            try:
                self._step(batch, counts)
            except Exception as error:  # the process's edge: every request of the step gets the error
                for waiting in batch:
                    self._end(waiting, error)

    @torch.inference_mode()
    def _step(self, batch: Sequence[QueuedRequest], counts: Sequence[int]) -> None:
        for waiting in batch:
            if not waiting.block_table:
                self._admit(waiting)
        chunks = [self._chunk(waiting, count) for waiting, count in zip(batch, counts, strict=True)]
        logits = iter(self._model.forward(chunks, self._kv).split(1))
        for waiting, count, chunk in zip(batch, counts, chunks, strict=True):
            waiting.num_computed += count
            if chunk.num_logits:
                row = next(logits)
                stop = waiting.request.stop
                forbid(row, [(0, stop.stop_token_ids if stop.min_tokens > 0 else ())])
                self._end(waiting, int(row.argmax()))

    def _admit(self, waiting: QueuedRequest) -> None:
        """Encodes the request's media, and allocates its blocks."""
        for item, tensors in zip(waiting.items, waiting.tensors, strict=True):
            ready = tensors.result()
            whole = Piece(ready, item.options, 0, ready.num_units)
            waiting.rows += self._encoder.encode(item.modality, [whole])
        num_tokens = len(waiting.request.prompt.token_ids)
        waiting.block_table = self._blocks.allocate(-(-num_tokens // self._blocks.block_size))

    def _chunk(self, waiting: QueuedRequest, count: int) -> SequenceChunk:
        start, end, prompt = waiting.num_computed, waiting.num_computed + count, waiting.request.prompt
        pieces = []
        for placed, rows in zip(prompt.media, waiting.rows, strict=True):
            for token, row, num_rows in placed.pieces(start, end):
                pieces.append(FeatureSlice(token - start, rows[row : row + num_rows]))
        return SequenceChunk(
            prompt.token_ids[start:end],
            self._model.positions(prompt).position_ids[..., start:end],
            start,
            waiting.block_table,
            tuple(pieces),
            num_logits=int(end == len(prompt.token_ids)),
        )

    def _end(self, waiting: QueuedRequest, outcome: int | Exception) -> None:
        self._blocks.free(waiting.block_table)
        self._waiting.remove(waiting)
        waiting.loop.call_soon_threadsafe(_settle, waiting.token, outcome)


class OneToken:
    """The token events of one request: exactly one."""

    has_next = False  # tokens that are there already

    def __init__(self, request_id: str, token: asyncio.Future[int]):
        self._request_id = request_id
        self._token = token

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(self._request_id, (await self._token,), FinishReason.LENGTH)

    async def aclose(self) -> None:
        self._token.cancel()


def _settle(token: asyncio.Future[int], outcome: int | Exception) -> None:
    if token.done():
        return
    if isinstance(outcome, Exception):
        token.set_exception(from_info(to_info(outcome)))
    else:
        token.set_result(outcome)


class SynchronousDoor(Door):
    """The cluster's door in front of the synchronous engine."""

    def __init__(self, args: ClusterArgs, engine: SynchronousEngine):
        super().__init__(args, _never_called)
        self.dispatcher = engine

    def is_ready(self) -> bool:
        return True


async def _never_called(replica_id: str, request_id: str) -> None:
    raise AssertionError("there is no decode worker here")


def serve(args: ClusterArgs, dtype: torch.dtype, port: int, num_threads: int) -> None:
    """Serves until SIGTERM or SIGINT. Changes torch's number of threads."""
    torch.set_num_threads(num_threads)
    door = SynchronousDoor(args, SynchronousEngine(args, dtype))
    uvicorn.run(build_api(door), host="127.0.0.1", port=port, log_level="warning")
