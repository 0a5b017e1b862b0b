"""Where the time of one model step goes on this CPU.

    python -m bench.step MODEL [--batch 1,4,16] [--context 200,1000] [--prefill 64,128,512] [--threads N]
                               [--variant avx2] [--best]
    python -m bench.step MODEL --chunk 64 --batch 16 --context 200

A decode step (one token for each of `batch` sequences of `context` tokens) and a prefill step (a prompt's
first chunk) of the language half, loaded as a worker loads it, over caches of random KV. Every round runs
each measurement once. The figures are medians over the rounds (`--best`: minima, for a machine that others
use):

    floor      bytes that the step must read (weights of its linears, K and V of its contexts) / bandwidth
    linears    the linears and the head alone, called one by one on packed weights of their own, in order
    attention  every layer's writing of K and V and attention alone
    whole      the whole step
    rest       whole - linears - attention: norms, rotations, sums, embeddings, Python
    outside    the share of the whole step that its threads were not in kernels: waiting for each other or for
               Python. Measured inside the step where the model runs in one native call; else rest / whole
    GFLOP/s    two operations for each weight and token, linears only, in the whole step

If a worker's model runs several of these parts in one call, that saves time, and the rest is smaller or
negative.

With `--chunk` the table is of what the host adds, by the kind of call and by what the step holds: the time
of a call that its threads were not in kernels, including the making of the chunks; medians and minima.

    decode      the decode step, by `LanguageModel.decode`
    one-token   the same as chunks of one token, by `LanguageModel.forward`
    mixed       all but one of these rows, and a prompt's chunk of so many tokens in place of the last
    chunk       that chunk alone

Bandwidth: torch sums float32 numbers from BANDWIDTH_BYTES of memory on huge pages, with as many threads as
the step has. Every round times this, too. Linears are `nn.Linear` modules. The experts of a mixture are not,
so they count as rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.arguments import add_dtype, numbers, parser_of
from bench.rounds import Work, in_turns
from cluster.kvcache.memory import BlockMemory, on_huge_pages
from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.cpu.library import Kernels, load
from cluster.model.cpu.modules import PackedWeights
from cluster.model.kv_format import layer_cache
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import make_backend
from cluster.model.loading import Half, load_half
from cluster.model.probe import LayerShape, probe_backbone
from cluster.model.support import family_of
from cluster.native.variants import select

BLOCK_SIZE = 16
BANDWIDTH_BYTES = 512 << 20  # many times the largest cache
GATED = {"gate_proj", "up_proj", "down_proj"}
COLUMNS = ("MB", "floor", "linears", "attention", "whole", "rest", "outside", "GFLOP/s")


@dataclass(frozen=True)
class ModelStep:
    """A step that computes `new` more tokens of each of `batch` sequences; each has `context` tokens
    already.
    """

    batch: int
    context: int
    new: int

    @property
    def name(self) -> str:
        return f"decode {self.batch} x {self.context}" if self.context else f"prefill {self.new}"


@dataclass(frozen=True)
class StepTiming:
    """The timing of one step: bytes that it must read, operations of its linears, seconds."""

    step: ModelStep
    num_bytes: int
    num_operations: int
    floor_s: float
    linears_s: float
    attention_s: float
    whole_s: float
    kernels_s: float | None = None  # of each thread, in the whole step

    @property
    def rest_s(self) -> float:
        return self.whole_s - self.linears_s - self.attention_s

    @property
    def outside_ratio(self) -> float:
        outside_s = self.rest_s if self.kernels_s is None else self.whole_s - self.kernels_s
        return outside_s / self.whole_s


@dataclass(frozen=True)
class StepReport:
    """Bandwidths in bytes per second, and a timing for each step."""

    bandwidth: float  # of the picked round; `floor_s` is computed with it
    best_bandwidth: float
    timings: tuple[StepTiming, ...]


@dataclass(frozen=True)
class TimedLinear:
    """run: [rows, inputs] → [rows, outputs], with a weight that no other linear shares."""

    run: Callable[[Tensor], Tensor]
    inputs: int
    num_weights: int
    num_bytes: int


class ModelParts:
    """A model's linears and attention, to be run alone.

    The constructor loads the language half once more; it keeps packed weights only.
    """

    def __init__(self, path: Path, dtype: torch.dtype, kernels: Kernels | None):
        model = load_half(path, Half.LANGUAGE, dtype=dtype, device="cpu")
        family, config = family_of(model.config), model.config.get_text_config()
        text = getattr(model.model, family.text_module) if family.modalities else model.model
        self.dtype = dtype
        self.query_heads: int = config.num_attention_heads
        self.layers: Sequence[LayerShape] = probe_backbone(text, config.hidden_size).shapes
        self.linears = [packed(kernels, *weights) for weights in matrices(text)]
        self.head = packed(kernels, cast(nn.Linear, model.get_output_embeddings()).weight)

    def num_bytes(self, kv: BlockMemory, step: ModelStep) -> int:
        weights = sum(linear.num_bytes for linear in (*self.linears, self.head))
        return weights + step.batch * step.context * kv.layout.block_bytes // BLOCK_SIZE

    def num_operations(self, step: ModelStep) -> int:
        weights = sum(linear.num_weights for linear in self.linears)
        return 2 * step.batch * (step.new * weights + self.head.num_weights)

    def run_linears(self, inputs: Mapping[int, Tensor], last: Tensor) -> None:
        for linear in self.linears:
            linear.run(inputs[linear.inputs])
        self.head.run(last)

    def linears_work(self, step: ModelStep) -> Work:
        rows = step.batch * step.new
        inputs = {
            size: torch.randn(rows, size).to(self.dtype) for size in {each.inputs for each in self.linears}
        }
        return partial(self.run_linears, inputs, torch.randn(step.batch, self.head.inputs).to(self.dtype))

    def attention_work(self, kv: BlockMemory, step: ModelStep) -> Work:
        backend = make_backend(torch.device("cpu"), self.dtype)
        rows = step.batch * step.new
        calls: list[tuple[LayerAttention, Tensor, Tensor, Tensor]] = []
        for shape in self.layers:
            layer = LayerAttention(shape.key[1] ** -0.5, shape.window)
            heads = ((self.query_heads, shape.key[1]), shape.key, shape.value)
            query, key, value = (torch.randn(rows, *each).to(self.dtype) for each in heads)
            calls.append((layer, query, key, value))

        def run() -> None:
            batch = paged_batch(kv, step)
            for layer_idx, (layer, query, key, value) in enumerate(calls):
                cache = layer_cache(kv, layer_idx)
                backend.write(batch, cache, key, value)
                backend.attend(batch, layer, query, key, value, cache)

        return run


def matrices(module: nn.Module) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(weight, up projection, bias) of everything that is one multiplication in a step, in the order of the
    modules.
    """
    children = dict(module.named_children())
    if children.keys() >= GATED:
        gate, up, down = (
            cast(nn.Linear, children.pop(name)) for name in ("gate_proj", "up_proj", "down_proj")
        )
        yield gate.weight, up.weight, gate.bias
        yield down.weight, None, down.bias
    for child in children.values():
        if isinstance(child, nn.Linear):
            yield child.weight, None, child.bias
        else:
            yield from matrices(child)


def packed(
    kernels: Kernels | None, weight: Tensor, up: Tensor | None = None, bias: Tensor | None = None
) -> TimedLinear:
    """A linear on the native kernels, or on torch where there are none."""
    outputs, inputs = weight.shape
    num_weights = outputs * inputs * (1 if up is None else 2)
    if kernels is not None:
        run: Callable[[Tensor], Tensor] = PackedWeights(kernels, weight, up=up, bias=bias)
    elif up is not None:
        run = partial(F.linear, weight=torch.cat([weight, up]))
    else:
        run = partial(F.linear, weight=weight, bias=bias)
    return TimedLinear(run, inputs, num_weights, num_weights * weight.element_size())


def tables_of(step: ModelStep) -> list[list[int]]:
    """A block table for each sequence; no block is shared."""
    width = -(-(step.context + step.new) // BLOCK_SIZE)
    return [list(range(seq * width, (seq + 1) * width)) for seq in range(step.batch)]


def paged_batch(kv: BlockMemory, step: ModelStep) -> PagedBatch:
    tables = torch.tensor(tables_of(step))
    positions = torch.arange(step.context, step.context + step.new)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    context_lens = [step.context + step.new] * step.batch
    return PagedBatch(
        kv,
        BLOCK_SIZE,
        slots=slots.flatten(),
        query_lens=[step.new] * step.batch,
        context_lens=context_lens,
        block_tables=tables,
        context_lens_tensor=torch.tensor(context_lens),
        bidirectional_spans=[()] * step.batch,
    )


def whole_work(model: LanguageModel, kv: BlockMemory, step: ModelStep) -> Work:
    tables = tables_of(step)
    token_ids = [seq % model.vocab_size for seq in range(step.new)]
    if step.context:
        contexts, deltas = [step.context] * step.batch, [0] * step.batch
        return lambda: model.decode([1] * step.batch, contexts, deltas, tables, kv)
    chunks = [SequenceChunk(token_ids, torch.arange(step.new), 0, table) for table in tables]
    return lambda: model.forward(chunks, kv)


def noting_kernels(model: LanguageModel, whole: Work) -> tuple[Work, list[float]]:
    """The same work, and a list that gets the time in kernels of each call, if the model knows it."""
    times_s: list[float] = []

    def run() -> None:
        whole()
        if model.kernels_s is not None:
            times_s.append(model.kernels_s)

    return run, times_s


def random_kv(model: LanguageModel, steps: Sequence[ModelStep]) -> BlockMemory:
    """Random KV in as many blocks as the largest step needs."""
    kv = BlockMemory(model.kv_layout, max(sum(map(len, tables_of(step))) for step in steps))
    for segment in kv.segments:
        segment.normal_()
    return kv


def bandwidth_work(num_bytes: int) -> Work:
    """A function that reads so many bytes of memory."""
    return on_huge_pages(num_bytes).view(torch.float32).fill_(1).sum


@torch.inference_mode()
def measure(
    path: Path,
    steps: Sequence[ModelStep],
    dtype: torch.dtype,
    seconds: float,
    pick: Callable[[list[float]], float] = statistics.median,
    bandwidth_bytes: int = BANDWIDTH_BYTES,
) -> StepReport:
    """`pick` reduces the times of all rounds to one figure. Blocks for at least `seconds` per step; uses
    torch's number of threads.
    """
    model = LanguageModel.load(path, dtype=dtype, block_size=BLOCK_SIZE)
    parts, kv = ModelParts(path, dtype, load()), random_kv(model, steps)
    read = bandwidth_work(bandwidth_bytes)
    picked: list[list[float]] = []
    reads_s: list[float] = []
    for step in steps:
        whole, kernels_s = noting_kernels(model, whole_work(model, kv, step))
        works = (parts.linears_work(step), parts.attention_work(kv, step), whole, read)
        *times, reads = in_turns(works, seconds)
        picked.append([pick(each) for each in (*times, kernels_s) if each])
        reads_s += reads
    bandwidth = bandwidth_bytes / pick(reads_s)
    timings = []
    for step, times_s in zip(steps, picked, strict=True):
        num_bytes, num_operations = parts.num_bytes(kv, step), parts.num_operations(step)
        floor_s = num_bytes / bandwidth
        timings.append(StepTiming(step, num_bytes, num_operations, floor_s, *times_s))
    return StepReport(bandwidth, bandwidth_bytes / min(reads_s), tuple(timings))


def mixed_works(model: LanguageModel, kv: BlockMemory, step: ModelStep, num_tokens: int) -> dict[str, Work]:
    """The answers of a decode step in other calls, and with a prompt's chunk in place of the last answer."""
    tables, context = tables_of(replace(step, new=num_tokens)), step.context

    def rows(count: int) -> list[SequenceChunk]:
        return [SequenceChunk([1], context, context, table) for table in tables[:count]]

    def chunk() -> SequenceChunk:
        return SequenceChunk([1] * num_tokens, context, context, tables[-1])

    contexts, zeros = [context] * step.batch, [0] * step.batch
    return {
        "decode": lambda: model.decode([1] * step.batch, contexts, zeros, tables, kv),
        "one-token": lambda: model.forward(rows(step.batch), kv),
        "mixed": lambda: model.forward([*rows(step.batch - 1), chunk()], kv),
        "chunk": lambda: model.forward([chunk()], kv),
    }


def host_table(model: LanguageModel, works: Mapping[str, Work], seconds: float) -> str:
    """What the host adds to each step, in milliseconds. Raises ValueError for a model that does not run in
    one native call, because only that call times its kernels."""
    noted = [noting_kernels(model, work) for work in works.values()]
    times = in_turns([run for run, _ in noted], seconds)
    lines = [f"{'step (ms)':12}{'host':>10}{'least':>10}{'whole':>10}"]
    for name, (_, kernels_s), whole_s in zip(works, noted, times, strict=True):
        if not kernels_s:
            raise ValueError("this model does not run in one native call: its kernels are not timed")
        host_s = [whole - kernels for whole, kernels in zip(whole_s, kernels_s[1:], strict=True)]
        cells = (statistics.median(host_s), min(host_s), statistics.median(whole_s))
        lines.append(f"{name:12}" + "".join(f"{1e3 * cell:10.3f}" for cell in cells))
    return "\n".join(lines)


def table(timings: Sequence[StepTiming]) -> str:
    """Times in milliseconds."""
    lines = [f"{'step (ms)':20}" + "".join(f"{name:>11}" for name in COLUMNS)]
    for timing in timings:
        seconds = (timing.floor_s, timing.linears_s, timing.attention_s, timing.whole_s, timing.rest_s)
        rate = timing.num_operations / timing.whole_s / 1e9
        cells = (
            f"{timing.num_bytes / 1e6:11.1f}",
            *(f"{1e3 * each:11.2f}" for each in seconds),
            f"{timing.outside_ratio:11.1%}",
            f"{rate:11.1f}",
        )
        lines.append(f"{timing.step.name:20}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16], help="sequences of a decode step")
    parser.add_argument("--context", type=numbers, default=[200, 1000], help="tokens of each of them")
    parser.add_argument("--prefill", type=numbers, default=[64, 128, 512], help="tokens of a chunk")
    parser.add_argument("--chunk", type=int, help="of a prompt: what the host adds to steps with it, only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_dtype(parser, "bfloat16")
    parser.add_argument("--variant", default="auto", help="of the CPU kernels; auto: the best")
    parser.add_argument("--seconds", type=float, default=3.0, help="per step")
    parser.add_argument("--best", action="store_true", help="the fastest round of each, not the median")
    arguments = parser.parse_args()
    select(arguments.variant)
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    steps = [ModelStep(batch, context, 1) for batch in arguments.batch for context in arguments.context]
    if arguments.chunk:
        model = LanguageModel.load(arguments.model, dtype=dtype, block_size=BLOCK_SIZE)
        kv = random_kv(model, [replace(step, new=arguments.chunk) for step in steps])
        for step in steps:
            works = mixed_works(model, kv, step, arguments.chunk)
            print(
                f"{step.name}, a chunk of {arguments.chunk}",
                host_table(model, works, arguments.seconds),
                sep="\n",
            )
        return
    steps += [ModelStep(1, 0, num_tokens) for num_tokens in arguments.prefill]
    pick = min if arguments.best else statistics.median
    report = measure(arguments.model, steps, dtype, arguments.seconds, pick)
    speed = f"{report.bandwidth / 1e9:.1f} GB/s (best {report.best_bandwidth / 1e9:.1f})"
    print(f"{arguments.threads} threads, {arguments.dtype}, memory is read at {speed}")
    print(table(report.timings))


if __name__ == "__main__":
    main()
