"""CUDA graphs of the decode step: one per batch size of a short list, recorded at its first use and replayed
afterwards.

A replay repeats the recorded launches at the recorded addresses. Therefore:

* a step's inputs always use the same buffers (`StepMatrix`),
* a batch is padded to a recorded size with rows that write into a scratch block,
* the logits are always in the same tensor,
* attention must not read the contexts on the host (`CudaAttention.can_capture`).

Tried on the CPU with a stand-in for the capture; `capture_cuda` itself is untried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.copies import DecodeInputs, StepMatrix
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.step_model import StepModel

logger = logging.getLogger(__name__)

Replay = Callable[[], Tensor]  # enqueues the recorded work; always returns the same tensor


class DecodeStep(Protocol):
    def __call__(self, inputs: DecodeInputs) -> Tensor:
        """[B, vocab_size] float32 logits. Enqueues work only: no synchronisation, no copies from the host."""
        ...


class Capture(Protocol):
    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        """Runs `work` any number of times and records it."""
        ...


class CapturableModel(StepModel, Protocol):
    """The part of `LanguageModel` that graphs need."""

    block_size: int
    max_model_len: int

    def decode_step(self, inputs: DecodeInputs, kv: BlockMemory) -> Tensor:
        """A `DecodeStep` over `kv`."""
        ...


class DecodeGraphs:
    """Runs decode steps of up to `max_batch` sequences. One thread."""

    def __init__(self, step: DecodeStep, matrix: StepMatrix, capture: Capture):
        self._step = step
        self._matrix = matrix
        self._capture = capture
        self._sizes = batch_sizes(matrix.max_batch)
        self._replays: dict[int, Replay] = {}

    def decode(
        self,
        token_ids: Sequence[int],
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> Tensor:
        """As `LanguageModel.decode`. The logits [B, vocab_size] are valid until the next call."""
        count = len(token_ids)
        size = next(size for size in self._sizes if size >= count)
        self._matrix.fill(token_ids, context_lens, deltas, block_tables, size)
        return self._replay(size)()[:count]

    def warm_up(self) -> None:
        """Records every size, largest first, so that the smaller ones fit into its memory. Takes minutes at
        most; without it the first requests wait. Writes into the scratch block only."""
        for size in reversed(self._sizes):
            self._matrix.fill([], [], [], [], size)
            self._replay(size)

    def _replay(self, size: int) -> Replay:
        if size not in self._replays:
            inputs = self._matrix.inputs(size)
            self._replays[size] = self._capture(lambda: self._step(inputs))
        return self._replays[size]


class GraphedModel:
    """A `LanguageModel` whose decode steps over `kv` are replayed. Other calls go to the model itself. One
    thread.

    The last block of `kv` is the scratch block: it must not belong to the pool that requests draw from.
    """

    def __init__(self, model: CapturableModel, kv: BlockMemory, max_batch: int, capture: Capture):
        max_blocks = -(-model.max_model_len // model.block_size)
        scratch_block = kv.num_blocks - 1
        matrix = StepMatrix(max_batch, max_blocks, model.block_size, scratch_block, kv.buffer.device)
        self._model = model
        self._kv = kv
        self._graphs = DecodeGraphs(lambda inputs: model.decode_step(inputs, kv), matrix, capture)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records all batch sizes. Raises RuntimeError if the model does something that cannot be
        recorded."""
        self._graphs.warm_up()

    def forward(
        self, chunks: Sequence[SequenceChunk], kv: BlockMemory, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        return self._model.forward(chunks, kv, on_layer)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], kv: BlockMemory) -> None:
        self._model.copy_blocks(sources, targets, kv)

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Sequence[int],
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
    ) -> Tensor:
        """The logits are valid until the next call."""
        assert kv is self._kv, "graphs hold the addresses of one memory"
        return self._graphs.decode(token_ids, context_lens, deltas, block_tables)


def with_graphs(model: LanguageModel, kv: BlockMemory, max_batch: int) -> StepModel:
    """The model with recorded decode steps. If they cannot be recorded: the model itself, and the log says
    why. On CUDA."""
    if not model.can_capture_decode(kv):
        logger.info("decode steps are not recorded: their attention needs the host")
        return model
    graphed = GraphedModel(model, kv, max_batch, capture_cuda())
    try:
        graphed.warm_up()
    except RuntimeError as error:
        logger.warning("decode steps cannot be recorded: %s", error)
        return model
    return graphed


def batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 64 and of 32 after that; the last is max_batch. Padding small batches
    costs little, because most of such a step is reading the weights, which all rows share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_batch, 32)]
    return [size for size in sizes if size < max_batch] + [max_batch]


def capture_cuda() -> Capture:
    """A capture whose graphs share one memory pool, so only one of them may run at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Tensor]) -> Replay:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # compiles kernels and initialises libraries outside the recording
            with refusing_reads():
                work()
        before = torch.cuda.current_stream()
        before.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads of a worker, NCCL's among them, may use the device meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = work()
        finally:
            torch.cuda.set_stream(before)  # which a recording that failed may not have done

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture


@contextmanager
def refusing_reads() -> Iterator[None]:
    """Inside, work that reads the device on the host raises RuntimeError. In a recording such a read leaves
    the process unusable: torch 2.11 goes on allocating from the recording's memory afterwards
    (pytorch/pytorch#180395). The switch is the process's: no other thread may wait for a stream meanwhile.
    Workers record while they load, when no other thread does."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
