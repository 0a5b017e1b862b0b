"""How far steps are from what a device can do: answers against bytes ÷ bandwidth, prompts against FLOPs ÷
peak, with random weights; and one layer's attention over long contexts.

A step is computed as a worker computes it: model, memory and recorded steps are those that `load_language`
gives a worker of all phases, and its time ends when the drawn tokens are on the host. Its kernels, and
whether it was recorded, are reported by the profiler (`bench.gpu.kernels`), not by what was meant to happen.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.kernels import KernelSums, kernels_of
from bench.gpu.machine import DeviceSpeed, median_s, release
from bench.gpu.models import SHAPES, ModelShape, write_checkpoint
from cluster.config.settings import ClusterArgs
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import AttentionShape, LayerAttention, PagedBatch
from cluster.model.kv_format import KvCacheDtype, kv_segments, layer_cache
from cluster.model.language import SequenceChunk
from cluster.model.language_parts import make_backend
from cluster.model.sampling import sample
from cluster.types.members import Role
from cluster.types.request import SamplingParams
from cluster.worker.language import Language, LanguageSizes, load_language
from cluster.worker.setup import set_up

BLOCK_SIZE = 16
ROUNDS = 10
MAX_STEP_TOKENS = 2048


@dataclass(frozen=True)
class StepSizes:
    """What is measured of each model."""

    batches: Sequence[int]  # answers of a decode step
    context: int  # tokens that an answer sees
    chunk: int  # tokens of a prompt, alone and beside `beside` answers
    beside: int
    prompt: int  # tokens of a long prompt


@dataclass(frozen=True)
class StepTiming:
    """step_s: until the device has the logits; seconds: until the host has the drawn tokens. bound_s: the
    time that bandwidth and peak allow."""

    what: str
    step_s: float
    seconds: float
    bound_s: float
    kernels: KernelSums

    @property
    def share(self) -> float:
        return self.bound_s / self.seconds


def load_worker(
    name: str, machine: DeviceSpeed, kv_cache_dtype: KvCacheDtype, max_sequences: int, num_kv_blocks: int
) -> Language:
    """A model with random weights, as a worker of all phases loads it. Raises ConfigError, with the
    arithmetic, if the device has too little memory."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(SHAPES[name], Path(folder), machine.device, machine.dtype)
        release(machine.device)
        args = worker_args(folder, machine, kv_cache_dtype=kv_cache_dtype)
        sizes = LanguageSizes(num_kv_blocks, args.whole.memory_share, 0, MAX_STEP_TOKENS, max_sequences)
        return load_language(args, set_up(args, "bench-gpu", transport="in_process"), Role.WHOLE, sizes)


def worker_args(model: str | Path, machine: DeviceSpeed, **fields: object) -> ClusterArgs:
    """The arguments of a cluster that is one worker."""
    return ClusterArgs.model_validate({
        "model": str(model), "roles": ["whole"], "block_size": BLOCK_SIZE,
        "device": machine.device.type, "dtype": str(machine.dtype).removeprefix("torch."),
        "weight_cache": {"max_bytes": 0}, **fields,
    })  # fmt: skip


def model_steps(
    name: str, machine: DeviceSpeed, kv_cache_dtype: KvCacheDtype, sizes: StepSizes
) -> Iterator[StepTiming]:
    """Holds the device's memory until the end of the iteration."""
    most = max(sizes.batches)
    num_blocks = most * blocks_of(sizes.context + 1) + blocks_of(sizes.prompt)
    language = load_worker(name, machine, kv_cache_dtype, most, num_blocks)
    runs = WorkerSteps(language, SHAPES[name], machine)
    for batch in sizes.batches:
        title = f"{name} decode at {batch}, context {sizes.context}"
        yield runs.timed(title, runs.decode(batch, sizes.context), batch, sizes.context, 0)
    for chunk, beside in ((sizes.chunk, 0), (sizes.chunk, sizes.beside), (sizes.prompt, 0)):
        title = f"{name} step of {chunk} prompt tokens"
        if beside:
            title = f"{title}, decode at {beside}, context {sizes.context}"
        yield runs.timed(title, runs.mixed(beside, sizes.context, chunk), beside, sizes.context, chunk)
    del language, runs
    release(machine.device)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True)
class WorkerSteps:
    """Steps of a worker's model over its KV. Every sequence has blocks of its own."""

    language: Language
    shape: ModelShape
    machine: DeviceSpeed

    def decode(self, batch: int, context: int, num_adapters: int = 0) -> Callable[[], Tensor]:
        """num_adapters: which the sequences have in turn."""
        tables = self._tables([context + 1] * batch)
        slots = [1 + seq % num_adapters for seq in range(batch)] if num_adapters else []
        arguments = ([1] * batch, [context] * batch, [0] * batch, tables, self.language.kv, slots)
        return lambda: self.language.steps.decode(*arguments)

    def mixed(self, num_answers: int, context: int, chunk: int) -> Callable[[], Tensor]:
        """Answers, then the first `chunk` tokens of a prompt, which ends there."""
        *answers, prompt = self._tables([*[context + 1] * num_answers, chunk])
        chunks = [SequenceChunk([1], context, context, table) for table in answers]
        chunks.append(SequenceChunk([1] * chunk, 0, 0, prompt))
        return lambda: self.language.steps.forward(chunks, self.language.kv)

    def timed(
        self, what: str, work: Callable[[], Tensor], num_answers: int, context: int, chunk: int
    ) -> StepTiming:
        rows = num_answers + (chunk > 0)
        params, positions = [SamplingParams()] * rows, [context + 1] * rows

        def drawn() -> list[int]:
            return sample(work(), params, positions)

        device = self.machine.device
        with torch.inference_mode():
            step_s, seconds = median_s(work, device, ROUNDS), median_s(drawn, device, ROUNDS)
            kernels = kernels_of(drawn, device)
        return StepTiming(what, step_s, seconds, self._bound_s(num_answers, context, chunk), kernels)

    def _bound_s(self, num_answers: int, context: int, chunk: int) -> float:
        """The weights are read once, or multiplied with all tokens, whichever takes longer. Then the
        KV of the answers is read. The head is multiplied for single rows only."""
        layout, machine, shape = self.language.kv.layout, self.machine, self.shape
        scores = shape.layers * 2 * chunk**2 * shape.heads * shape.head_width  # QK and PV, the visible half
        products_s = (2 * shape.layer_weights * (num_answers + chunk) + scores) / machine.flops_per_s
        weights_s = shape.num_weights * machine.dtype.itemsize / machine.bytes_per_s
        kv_bytes = num_answers * context * layout.block_bytes / BLOCK_SIZE
        return max(products_s, weights_s) + kv_bytes / machine.bytes_per_s

    def _tables(self, lengths: Sequence[int]) -> list[list[int]]:
        """The block tables of sequences with so many tokens each."""
        tables, first = [], 0
        for length in lengths:
            end = first + blocks_of(length)
            tables.append(list(range(first, end)))
            first = end
        return tables


def attention_step(
    what: str, kv_cache_dtype: KvCacheDtype, block_size: int, shape: ModelShape, batch: int, context: int,
    machine: DeviceSpeed,
) -> StepTiming:  # fmt: skip
    """One layer's attention of answers, by the backend that serves such blocks. On a GPU its time is that of
    its kernels: alone, it would be the host's."""
    width, device = shape.head_width, machine.device
    per_seq = -(-context // block_size)
    segments = kv_segments([(shape.kv_heads, width)] * 2, block_size, machine.dtype, kv_cache_dtype)
    kv = BlockMemory(MemoryLayout(segments), batch * per_seq, device)
    tables = torch.arange(batch * per_seq, device=device).view(batch, per_seq)
    lens = torch.full((batch,), context, device=device)
    slots = tables[:, -1] * block_size
    step = PagedBatch(kv, block_size, slots, [1] * batch, [context] * batch, tables, lens, [()] * batch)
    query = torch.randn(batch, shape.heads, width, device=device, dtype=machine.dtype)
    new = query[:, : shape.kv_heads].contiguous()
    layer, cache = LayerAttention(width**-0.5), layer_cache(kv, 0)
    backend = make_backend(device, machine.dtype, AttentionShape(kv.layout, block_size, shape.heads, layer))

    def work() -> Tensor:
        return backend.attend(step, layer, query, new, new, cache)

    host_s, kernels = median_s(work, device, ROUNDS), kernels_of(work, device)
    seconds = kernels.busy_us / 1e6 if device.type == "cuda" else host_s
    num_bytes = batch * context * kv.layout.block_bytes / block_size
    return StepTiming(what, host_s, seconds, num_bytes / machine.bytes_per_s, kernels)
