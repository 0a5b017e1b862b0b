"""Linears of a 0.5-billion-parameter model on this CPU, and drawing tokens from its logits: torch against the
native kernels.

`python -m bench.kernels [--dtypes f32,bf16,i8] [--rows 1,4,16] [--threads 1,2] [--seconds 0.4]`

Each call uses the next of several copies of the weight. Together the copies exceed the last cache, so that
weights come from memory as in a decode step. The two implementations are called alternately; the table has
the best and the median microseconds of each. GB/s counts the weight once, GFLOP/s two operations for each
product; both are those of the best call. torch has no counterpart to i8 with these inputs: i8 is compared
with torch's bf16.

A second table: rows of 151,936 logits, sampled at temperature 1 with one filter or none, microseconds per
row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cpu.library import Kernels, load
from cluster.model.cpu.modules import PackedWeights
from cluster.model.sampling import draw, keep_likely, sample
from cluster.types.request import SamplingParams

CACHE_BYTES = 96 << 20
MAX_COPIES = 64
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


def alternate(first: Sequence[Callable[[], object]], second: Sequence[Callable[[], object]], seconds: float):
    """Calls the members of both in turn, at least three times each. Returns the two timings."""
    times: tuple[list[float], list[float]] = ([], [])
    end, call = time.perf_counter() + seconds, 0
    while call < 3 or time.perf_counter() < end:
        for functions, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            functions[call % len(functions)]()
            taken.append(1e6 * (time.perf_counter() - start))
        call += 1
    return tuple(CallTiming(min(taken), statistics.median(taken)) for taken in times)


def torch_function(shape: LinearShape, weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    if not shape.gated:
        return lambda: F.linear(x, weight)
    gate, up = weight.chunk(2)
    return lambda: F.silu(F.linear(x, gate)) * F.linear(x, up)


def packed_weights(shape: LinearShape, weight: Tensor, kernels: Kernels, int8: bool) -> PackedWeights:
    gate, up = weight.chunk(2) if shape.gated else (weight, None)
    return PackedWeights(kernels, gate, up=up, int8=int8)


def measure(
    shape: LinearShape, dtype: str, row_counts: Sequence[int], kernels: Kernels, seconds: float
) -> None:
    weight_bytes = shape.inputs * shape.outputs * WEIGHT_BYTES[dtype]
    copies = max(2, min(MAX_COPIES, CACHE_BYTES // weight_bytes))
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    weights = [torch.randn(shape.outputs, shape.inputs, dtype=kind) for _ in range(copies)]
    xs = {rows: torch.randn(rows, shape.inputs, dtype=kind) for rows in row_counts}
    packed = [packed_weights(shape, weight, kernels, dtype == "i8") for weight in weights]
    for rows, x in xs.items():
        torch_calls = [torch_function(shape, weight, x) for weight in weights]
        native_calls = [partial(layer, x) for layer in packed]
        theirs, ours = alternate(torch_calls, native_calls, seconds)
        operations = 2 * rows * shape.inputs * shape.outputs
        print(
            f"{dtype:5}{shape.name:8}{shape.inputs:5} x {shape.outputs:<7}{torch.get_num_threads():3}{rows:6}"
            f"{theirs.best_us:11.1f}{theirs.median_us:11.1f}{ours.best_us:11.1f}{ours.median_us:11.1f}"
            f"{weight_bytes / ours.best_us / 1e3:8.1f}{operations / ours.best_us / 1e3:9.1f}"
            f"{theirs.best_us / ours.best_us:7.2f}x",
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Native CPU kernels against torch's.")
    parser.add_argument("--dtypes", default="f32,bf16,i8")
    parser.add_argument("--rows", default="1,4,16,64,256,1024")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=0.4, help="per line of the table")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    arguments = parser.parse_args()
    kernels = load()
    if kernels is None:
        raise SystemExit("no native kernels on this machine")
    row_counts = [int(rows) for rows in arguments.rows.split(",")]
    print(f"variant {kernels.variant}; microseconds")
    print(
        "dtype shape                    thr  rows torch best     median  ours best     median    GB/s  GFLOP/s  ratio"
    )
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        for dtype in arguments.dtypes.split(","):
            for shape in SHAPES:
                if shape.name in arguments.shapes.split(","):
                    measure(shape, dtype, row_counts, kernels, arguments.seconds)
    print("filter     thr  rows torch best     median  ours best     median  ratio")
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        for num_rows in (1, 16):
            measure_sampling(num_rows, arguments.seconds)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
