"""The native kernels on this CPU against torch: linears and prefill attention of a 0.5-billion-parameter
model, and drawing tokens from its logits.

`python -m bench.kernels [--variant avx2] [--tables linears,attention,sampling] [--dtypes f32,bf16,i8]
[--rows 1,4,16] [--threads 1,2] [--seconds 0.4]`

What the machine can do at most is measured first, for each number of threads: multiply-adds that stay in
registers, with the instructions that the variant has for each type, and reading memory. Percentages are of
that. One thread is timed by its CPU time, so that other programs do not count; several are timed by the
clock. The two implementations are called alternately; the tables have the best and the median microseconds
of each. Figures are those of the best call. To limit torch to AVX2, set `ONEDNN_MAX_CPU_ISA=AVX2`.

* Linears: each call uses the next of several copies of the weight. Together the copies exceed the last cache,
  so that weights come from memory as in a decode step. GB/s counts the weight once, GFLOP/s two operations
  for each product, both without the time of a call from Python over no rows, which a model's step does not
  have (3.8 to 4.5 us); the times and the ratio contain it. torch has no counterpart to i8 with these inputs:
  i8 is compared with torch's bf16.
* Attention: one sequence's chunk of new tokens after a context, over paged K and V; torch has them dense.
  Counted are the keys that a token sees: what is computed and masked lowers the percentage.
* Sampling: rows of 151,936 logits, at temperature 1 with one filter or none, microseconds per row.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arguments import numbers, parser_of, words
from bench.rounds import Work, in_turns
from cluster.kvcache.memory import BlockMemory, MemoryLayout, on_huge_pages
from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.attention_cpu import CpuAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cpu.library import Kernels, load
from cluster.model.cpu.modules import PackedWeights
from cluster.model.kv_format import kv_segments, layer_cache
from cluster.model.sampling import draw, keep_likely, sample
from cluster.native.variants import select
from cluster.types.request import SamplingParams

CACHE_BYTES = 96 << 20
MAX_COPIES = 64
READ_BYTES, LIMIT_CALLS = 128 << 20, 15
BLOCK_SIZE = 16
WEIGHT_BYTES = {"f32": 4, "bf16": 2, "i8": 1}


@dataclass(frozen=True)
class LinearShape:
    """`outputs`: rows of the weight; of a gated linear, gate and up together."""

    name: str
    inputs: int
    outputs: int
    gated: bool = False


SHAPES = (
    LinearShape("query", 896, 896),
    LinearShape("key", 896, 128),
    LinearShape("gate+up", 896, 9728, gated=True),
    LinearShape("down", 4864, 896),
    LinearShape("head", 896, 151936),
    LinearShape("demo", 256, 256),  # of the demo model
    LinearShape("demo mlp", 256, 1280, gated=True),
)


@dataclass(frozen=True)
class AttentionShape:
    """`context`: tokens before the new ones."""

    heads: int
    kv_heads: int
    width: int
    context: int
    new: int

    @property
    def operations(self) -> int:
        """Two products, two operations each, for every pair of a query and a key that it sees."""
        pairs = self.new * self.context + self.new * (self.new + 1) // 2
        return 4 * pairs * self.heads * self.width


ATTENTION_SHAPES = (
    AttentionShape(14, 2, 64, 0, 1024),
    AttentionShape(14, 2, 64, 2048, 256),
    AttentionShape(16, 8, 128, 0, 1024),
)

FILTERS = {
    "none": SamplingParams(temperature=1.0, seed=1),
    "top_k 50": SamplingParams(temperature=1.0, seed=1, top_k=50),
    "top_p 0.9": SamplingParams(temperature=1.0, seed=1, top_p=0.9),
    "min_p 0.1": SamplingParams(temperature=1.0, seed=1, min_p=0.1),
}


@dataclass(frozen=True)
class CallTiming:
    best_us: float
    median_us: float


@dataclass(frozen=True)
class Limits:
    """What this machine can do with some threads."""

    peak: dict[str, float]  # operations per second, by type of weights
    read_bytes_per_s: float


def limits_of(kernels: Kernels, threads: int) -> Limits:
    """The best of several calls of each."""
    peaks = {}
    for dtype in WEIGHT_BYTES:
        function = getattr(kernels.cdll, f"peak_{dtype}")
        function.argtypes, function.restype = (ctypes.c_int,), ctypes.c_double
        peaks[dtype] = max(function(threads) for _ in range(LIMIT_CALLS))
    read = kernels.cdll.read_bytes_per_s
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), ctypes.c_double
    data = on_huge_pages(READ_BYTES).fill_(1)  # as packed weights
    return Limits(peaks, max(read(data.data_ptr(), READ_BYTES, threads) for _ in range(LIMIT_CALLS)))


def alternate(first: Sequence[Work], second: Sequence[Work], seconds: float) -> list[CallTiming]:
    """Calls the members of both in turn, at least three times each. Returns the two timings."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    members = (itertools.cycle(first), itertools.cycle(second))
    works = [lambda each=each: next(each)() for each in members]
    times = in_turns(works, seconds, clock, rounds=3)
    return [CallTiming(1e6 * min(taken), 1e6 * statistics.median(taken)) for taken in times]


def torch_function(shape: LinearShape, weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    if not shape.gated:
        return lambda: F.linear(x, weight)
    gate, up = weight.chunk(2)
    return lambda: F.silu(F.linear(x, gate)) * F.linear(x, up)


def packed_weights(shape: LinearShape, weight: Tensor, kernels: Kernels, int8: bool) -> PackedWeights:
    gate, up = weight.chunk(2) if shape.gated else (weight, None)
    return PackedWeights(kernels, gate, up=up, int8=int8)


def measure(
    shape: LinearShape,
    dtype: str,
    row_counts: Sequence[int],
    kernels: Kernels,
    limits: Limits,
    seconds: float,
) -> None:
    weight_bytes = shape.inputs * shape.outputs * WEIGHT_BYTES[dtype]
    copies = max(2, min(MAX_COPIES, CACHE_BYTES // weight_bytes))
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    weights = [torch.randn(shape.outputs, shape.inputs, dtype=kind) for _ in range(copies)]
    xs = {rows: torch.randn(rows, shape.inputs, dtype=kind) for rows in row_counts}
    packed = [packed_weights(shape, weight, kernels, dtype == "i8") for weight in weights]
    nothing = partial(packed[0], torch.empty(0, shape.inputs, dtype=kind))
    call_us = alternate([nothing], [nothing], seconds / 10)[0].best_us
    for rows, x in xs.items():
        torch_calls = [torch_function(shape, weight, x) for weight in weights]
        native_calls = [partial(layer, x) for layer in packed]
        theirs, ours = alternate(torch_calls, native_calls, seconds)
        kernel_us = max(ours.best_us - call_us, 0.1)
        rate = 1e6 * 2 * rows * shape.inputs * shape.outputs / kernel_us
        read = 1e6 * weight_bytes / kernel_us
        print(
            f"{dtype:5}{shape.name:9}{shape.inputs:5} x {shape.outputs:<7}{torch.get_num_threads():3}{rows:6}"
            f"{theirs.best_us:11.1f}{theirs.median_us:11.1f}{ours.best_us:11.1f}{ours.median_us:11.1f}"
            f"{read / 1e9:8.1f}{read / limits.read_bytes_per_s:6.0%}"
            f"{rate / 1e9:9.1f}{rate / limits.peak[dtype]:6.0%}"
            f"{theirs.best_us / ours.best_us:7.2f}x",
            flush=True,
        )


def measure_attention(
    shape: AttentionShape, dtype: str, kernels: Kernels, limits: Limits, seconds: float
) -> None:
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    total = shape.context + shape.new
    num_blocks = -(-total // BLOCK_SIZE)
    rows = [(shape.kv_heads, shape.width)] * 2
    kv = BlockMemory(MemoryLayout(kv_segments(rows, BLOCK_SIZE, kind)), num_blocks)
    table = torch.randperm(num_blocks)
    positions = torch.arange(total)
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    key, value = (torch.randn(total, shape.kv_heads, shape.width, dtype=kind) for _ in range(2))
    cache = layer_cache(kv, 0)
    cache.write(slots, key, value)
    batch = PagedBatch(
        kv, BLOCK_SIZE, slots[shape.context :], [shape.new], [total], table[None], torch.tensor([total]), [[]]
    )
    query = torch.randn(shape.new, shape.heads, shape.width, dtype=kind)
    layer = LayerAttention(shape.width**-0.5, None, None, None)
    native = CpuAttention(kernels.cdll, TorchAttention())
    queries, keys, values = (x.transpose(0, 1)[None].contiguous() for x in (query, key, value))
    mask = positions <= positions[shape.context :, None] if shape.context else None
    theirs, ours = alternate(
        [
            lambda: F.scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=mask is None, enable_gqa=True
            )
        ],
        [lambda: native.attend(batch, layer, query, key[shape.context :], value[shape.context :], cache)],
        seconds,
    )
    rate = 1e6 * shape.operations / ours.best_us
    print(
        f"{dtype:5}{shape.heads:3} of {shape.kv_heads:<3}{shape.width:5}{shape.context:9}{shape.new:6}"
        f"{torch.get_num_threads():5}"
        f"{theirs.best_us:11.1f}{theirs.median_us:11.1f}{ours.best_us:11.1f}{ours.median_us:11.1f}"
        f"{rate / 1e9:9.1f}{rate / limits.peak[dtype]:6.0%}{theirs.best_us / ours.best_us:7.2f}x",
        flush=True,
    )


def measure_sampling(num_rows: int, seconds: float) -> None:
    """Logits of a normal distribution with deviation 2.5. Torch draws row by row, which is faster than all at
    once.
    """
    logits = 2.5 * torch.randn(num_rows, SHAPES[-1].outputs)
    keys = list(range(num_rows))
    for name, params in FILTERS.items():
        rows = [params] * num_rows
        theirs, ours = alternate(
            [
                lambda p=params: [
                    draw(keep_likely(logits[i : i + 1] / 1.0, [p]), keys[i : i + 1]) for i in keys
                ]
            ],
            [lambda rows=rows: sample(logits, rows, keys)],
            seconds,
        )
        figures = (each / num_rows for t in (theirs, ours) for each in (t.best_us, t.median_us))
        print(
            f"{name:10}{torch.get_num_threads():4}{num_rows:6}"
            + "".join(f"{each:11.1f}" for each in figures)
            + f"{theirs.best_us / ours.best_us:7.2f}x",
            flush=True,
        )


def print_tables(arguments: argparse.Namespace, kernels: Kernels, threads: int) -> None:
    torch.set_num_threads(threads)
    limits = limits_of(kernels, threads)
    peaks = ", ".join(f"{dtype} {1e-9 * peak:.0f}" for dtype, peak in limits.peak.items())
    print(
        f"\nvariant {kernels.variant}, threads: {threads}; at most {peaks} GFLOP/s and "
        f"{1e-9 * limits.read_bytes_per_s:.1f} GB/s; microseconds"
    )
    dtypes, tables = arguments.dtypes, arguments.tables
    times = "torch best     median  ours best     median"
    if "linears" in tables:
        print(f"dtype shape                     thr  rows {times}    GB/s     %  GFLOP/s     %  ratio")
        for dtype in dtypes:
            for shape in SHAPES:
                if shape.name in arguments.shapes:
                    measure(shape, dtype, arguments.rows, kernels, limits, arguments.seconds)
    if "attention" in tables:
        print(f"dtype   heads width  context   new  thr {times}  GFLOP/s     %  ratio")
        for dtype in dtypes:
            for shape in ATTENTION_SHAPES if dtype != "i8" else ():
                measure_attention(shape, dtype, kernels, limits, arguments.seconds)
    if "sampling" in tables:
        print(f"filter     thr  rows {times}  ratio")
        for num_rows in (1, 16):
            measure_sampling(num_rows, arguments.seconds)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--variant", default="auto", help="auto: the best that this processor runs")
    parser.add_argument("--tables", type=words, default="linears,attention,sampling")
    parser.add_argument("--dtypes", type=words, default="f32,bf16,i8")
    parser.add_argument("--rows", type=numbers, default="1,4,16,64,256,1024")
    parser.add_argument("--threads", type=numbers, default="1,2")
    parser.add_argument("--seconds", type=float, default=0.4, help="per line of the table")
    parser.add_argument("--shapes", type=words, default=",".join(shape.name for shape in SHAPES))
    arguments = parser.parse_args()
    select(arguments.variant)
    kernels = load()
    if kernels is None:
        raise SystemExit("no native kernels on this machine")
    for threads in arguments.threads:
        print_tables(arguments, kernels, threads)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
