"""What the host adds to a step, by the kind of call and by what the step holds.

    python -m bench.mixed_steps MODEL [--rows 16] [--context 200] [--chunk 64] [--threads N] [--seconds 6]

Steps of the language half on this CPU, loaded as a worker loads it, over random KV:

    decode      one token of each of `rows` sequences of `context` tokens, by `LanguageModel.decode`
    one-token   the same as chunks of one token, by `LanguageModel.forward`
    mixed       all but one of these rows, and a chunk of `chunk` tokens in place of the last
    chunk       that chunk alone

Every round runs each step once. Host: the time of a call that its threads were not in kernels, including the
making of the chunks. Medians and minima over the rounds; on a busy machine compare the lines of one run. The
model must run in one native call, because only that call times its kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.step import BLOCK_SIZE
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel, SequenceChunk

Step = Callable[[], object]
Times = dict[str, list[tuple[float, float]]]  # per step: (host, whole) of each round, in seconds


def steps_of(model: LanguageModel, num_rows: int, context: int, num_chunk_tokens: int) -> dict[str, Step]:
    width = -(-(context + num_chunk_tokens) // BLOCK_SIZE)
    kv = BlockMemory(model.kv_layout, num_rows * width)
    for segment in kv.segments:
        segment.normal_()
    tables = [list(range(i * width, (i + 1) * width)) for i in range(num_rows)]
    contexts, zeros = [context] * num_rows, [0] * num_rows

    def rows(count: int) -> list[SequenceChunk]:
        return [SequenceChunk([1], context, context, table) for table in tables[:count]]

    def chunk() -> SequenceChunk:
        return SequenceChunk([1] * num_chunk_tokens, context, context, tables[-1])

    return {
        "decode": lambda: model.decode([1] * num_rows, contexts, zeros, tables, kv),
        "one-token": lambda: model.forward(rows(num_rows), kv),
        "mixed": lambda: model.forward([*rows(num_rows - 1), chunk()], kv),
        "chunk": lambda: model.forward([chunk()], kv),
    }


def measure(model: LanguageModel, steps: dict[str, Step], seconds: float) -> Times:
    """Measures at least three rounds. Raises ValueError for a model that does not run in one native call."""
    for step in steps.values():
        step()
    if model.kernels_s is None:
        raise ValueError("this model does not run in one native call: its kernels are not timed")
    times: Times = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["decode"]) < 3:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            whole_s = time.perf_counter() - start
            times[name].append((whole_s - model.kernels_s, whole_s))
    return times


def table(times: Times) -> str:
    lines = [f"{'step (ms)':12}{'host':>10}{'least':>10}{'whole':>10}"]
    for name, rounds in times.items():
        host, whole = zip(*rounds, strict=True)
        cells = (statistics.median(host), min(host), statistics.median(whole))
        lines.append(f"{name:12}" + "".join(f"{1e3 * cell:10.3f}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mixed_steps", description="What the host adds to a step."
    )
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=200, help="tokens of each sequence")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of the prompt's chunk")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = LanguageModel.load(arguments.model, dtype=getattr(torch, arguments.dtype), block_size=BLOCK_SIZE)
    steps = steps_of(model, arguments.rows, arguments.context, arguments.chunk)
    print(table(measure(model, steps, arguments.seconds)))


if __name__ == "__main__":
    main()
