"""How far steps are from what a device can do: decode against bytes ÷ bandwidth, prefill against FLOPs ÷
peak, with random weights; and one layer's decode attention by the backend that serves such blocks.

Bandwidth is that of a large copy, peak that of a large matrix product, both measured first. On a GPU, what is
not in a graph is launched from Python: its time is the host's as long as that is the longer one. First run on
an H100 on 2026-11-26.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers as hf

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import AttentionShape, LayerAttention, PagedBatch
from cluster.model.cuda.graphs import GraphedModel, RecordedSizes, capture_cuda
from cluster.model.kv_format import KvCacheDtype, kv_segments, layer_cache
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import make_backend
from cluster.model.step_model import StepModel
from cluster.worker.memory_plan import available_bytes

BLOCK_SIZE = 16
FROM_PYTHON = " from Python"
KV_SHARE = 0.7  # of the memory that is free beside the weights; larger batches are left out


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen2 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool


SHAPES = {
    "0.5b": ModelShape(896, 24, 14, 2, 4864, 151_936, True),
    "7b": ModelShape(3584, 28, 28, 4, 18_944, 152_064, False),
    "tiny": ModelShape(64, 2, 4, 2, 128, 300, True),
}


@dataclass(frozen=True)
class DeviceSpeed:
    device: torch.device
    dtype: torch.dtype
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class TableLine:
    """bound_s: the time that bandwidth or peak allow."""

    what: str
    seconds: float
    bound_s: float

    def __str__(self) -> str:
        numbers = f"{1e6 * self.seconds:12.1f} {1e6 * self.bound_s:12.1f} {self.bound_s / self.seconds:8.2f}"
        return f"{self.what:44} {numbers}"


def median_s(work: Callable[[], object], device: torch.device, repeats: int, calls: int = 1) -> float:
    """Seconds of one call, after two rounds to warm up.

    Each round times `calls` calls together, so that the host's work overlaps with the device's.
    """
    times = []
    for attempt in range(repeats + 2):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        _wait(device)
        if attempt >= 2:
            times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_machine(device: torch.device, dtype: torch.dtype, scale: int) -> DeviceSpeed:
    """scale: 1 means 1 GiB to copy and a product of 8192-wide square matrices; larger divides both."""
    source = torch.ones((1 << 30) // scale, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device, 10)
    side = 8192 // scale
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    product_s = median_s(lambda: matrix @ matrix, device, 10)
    return DeviceSpeed(device, dtype, 2 * source.numel() / copy_s, 2 * side**3 / product_s)


def nominal_bytes_per_s(device: torch.device) -> float | None:
    """What the product's data sheet gives its memory: two transfers a clock. None: not a GPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return 2 * 1e3 * found.memory_clock_rate * found.memory_bus_width / 8


def random_model(shape: ModelShape, machine: DeviceSpeed, kv_cache_dtype: KvCacheDtype) -> LanguageModel:
    config = hf.Qwen2Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192, tie_word_embeddings=shape.tied, eos_token_id=None, dtype=machine.dtype,
    )  # fmt: skip
    with torch.device(machine.device):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=machine.dtype)
    model = model.requires_grad_(False)
    return LanguageModel.from_model(model, block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype)


def decode_row(
    name: str,
    model: StepModel,
    kv: BlockMemory,
    weight_bytes: int,
    batch: int,
    context: int,
    machine: DeviceSpeed,
) -> TableLine:
    """One step of `batch` sequences with `context` tokens each. `kv` must be large enough for all of them."""
    per_seq = -(-(context + 1) // BLOCK_SIZE)
    tables = [list(range(i * per_seq, (i + 1) * per_seq)) for i in range(batch)]
    arguments = ([1] * batch, [context] * batch, [0] * batch, tables, kv)
    seconds = median_s(lambda: model.decode(*arguments), machine.device, 10)
    kv_bytes = batch * context * kv.layout.block_bytes / BLOCK_SIZE
    return TableLine(name, seconds, (weight_bytes + kv_bytes) / machine.bytes_per_s)


def prefill_row(
    name: str, model: LanguageModel, kv: BlockMemory, shape: ModelShape, num_tokens: int, machine: DeviceSpeed
) -> TableLine:
    """One prompt in one chunk; the output head runs for its last token only."""
    table = list(range(-(-num_tokens // BLOCK_SIZE)))
    chunk = SequenceChunk([1] * num_tokens, torch.arange(num_tokens), 0, table)
    seconds = median_s(lambda: model.forward([chunk], kv), machine.device, 5)
    head_width = shape.hidden // shape.heads
    attention = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * head_width)
    weights = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    scores = shape.layers * 2 * num_tokens**2 * shape.hidden  # QK and PV, the visible half
    return TableLine(name, seconds, (2 * weights * num_tokens + scores) / machine.flops_per_s)


def attention_row(
    name: str,
    kv_cache_dtype: KvCacheDtype,
    block_size: int,
    shape: ModelShape,
    batch: int,
    context: int,
    machine: DeviceSpeed,
) -> TableLine:
    """One layer's decode attention, by the backend that serves such blocks."""
    width = shape.hidden // shape.heads
    per_seq = -(-context // block_size)
    segments = kv_segments([(shape.kv_heads, width)] * 2, block_size, machine.dtype, kv_cache_dtype)
    kv = BlockMemory(MemoryLayout(segments), batch * per_seq, machine.device)
    tables = torch.arange(batch * per_seq, device=machine.device).view(batch, per_seq)
    lens = torch.full((batch,), context, device=machine.device)
    slots = tables[:, -1] * block_size
    step = PagedBatch(kv, block_size, slots, [1] * batch, [context] * batch, tables, lens, ())
    query = torch.randn(batch, shape.heads, width, device=machine.device, dtype=machine.dtype)
    new = query[:, : shape.kv_heads]
    layer, cache = LayerAttention(width**-0.5), layer_cache(kv, 0)
    wanted = AttentionShape(kv.layout, block_size, shape.heads, layer)
    backend = make_backend(machine.device, machine.dtype, wanted)
    seconds = median_s(
        lambda: backend.attend(step, layer, query, new, new, cache), machine.device, 10, calls=20
    )
    told = f"{name}{FROM_PYTHON if machine.device.type == 'cuda' else ''}"
    return TableLine(
        told, seconds, batch * context * kv.layout.block_bytes / block_size / machine.bytes_per_s
    )


def model_rows(
    name: str, machine: DeviceSpeed, kv_cache_dtype: KvCacheDtype, batches: Sequence[int], context: int
) -> list[TableLine]:
    """Decode without graphs, decode from graphs (on a GPU), prefill."""
    shape = SHAPES[name]
    model = random_model(shape, machine, kv_cache_dtype)
    per_seq = -(-(context + 1) // BLOCK_SIZE)
    room = available_bytes(machine.device) * KV_SHARE / (per_seq * model.kv_layout.block_bytes)
    batches = [batch for batch in batches if batch <= room]
    kv = BlockMemory(model.kv_layout, max(batches) * per_seq + 1, machine.device)
    weight_bytes = num_weights(shape) * machine.dtype.itemsize
    is_cuda = machine.device.type == "cuda"
    models: list[tuple[str, StepModel]] = [(f"decode{FROM_PYTHON if is_cuda else ''}", model)]
    if is_cuda:
        graphed = GraphedModel(model, kv, RecordedSizes.up_to(max(batches), 0), capture_cuda())
        graphed.warm_up()
        models.append(("decode, graphs", graphed))
    rows = []
    for batch in batches:
        for label, subject in models:
            title = f"{name} {label}, batch {batch}, context {context}"
            rows.append(decode_row(title, subject, kv, weight_bytes, batch, context, machine))
    rows.append(prefill_row(f"{name} prefill, {context} tokens", model, kv, shape, context, machine))
    return rows


def num_weights(shape: ModelShape) -> int:
    """How many weights a decode step reads: layers and output head, not the embedding table."""
    head_width = shape.hidden // shape.heads
    attention = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * head_width)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate) + shape.hidden * shape.vocab
