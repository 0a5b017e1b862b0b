"""What LoRA adapters cost a step of the language half on this CPU.

    python -m bench.adapters [--shape 0.5b] [--layers 4] [--adapters 8] [--rank 16] [--room-rank 64]

A checkpoint of random weights and adapters of all its linears are written to a temporary folder and loaded as
a worker loads them. Each step is run without adapters and with them, sequences having the adapters in turn.
Rounds alternate. The price is the quotient of both medians, less 1; beside it that of the fastest rounds,
and that of the bytes that a step reads: no step of few tokens can do better where memory is what it waits
for. With --processor-time one thread runs, and its own time is measured: other programs cannot take a part of
it, though they take a part of the memory's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from bench.arguments import parser_of
from bench.gpu.models import SHAPES, write_checkpoint
from bench.rounds import in_turns
from bench.step import BLOCK_SIZE, ModelStep, random_kv, tables_of
from cluster.config.adapters import Adapter, AdapterRoom, read_adapters
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel, SequenceChunk

STEPS = (ModelStep(1, 200, 1), ModelStep(8, 200, 1), ModelStep(32, 200, 1), ModelStep(1, 0, 512))


def write_adapter(linears: dict[str, nn.Linear], folder: Path, rank: int) -> Path:
    """Random matrices for all linears, as PEFT writes them."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, linear in linears.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.02 * torch.randn(rank, linear.in_features)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.02 * torch.randn(linear.out_features, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def work_of(
    model: LanguageModel, kv: BlockMemory, step: ModelStep, num_adapters: int
) -> Callable[[], object]:
    """num_adapters: which the sequences have in turn; 0: none."""
    tables = tables_of(step)
    slots = [1 + seq % num_adapters if num_adapters else 0 for seq in range(step.batch)]
    if step.context:
        contexts, deltas = [step.context] * step.batch, [0] * step.batch
        return partial(model.decode, [1] * step.batch, contexts, deltas, tables, kv, slots)
    chunks = [
        SequenceChunk([1] * step.new, 0, 0, table, adapter=slot)
        for table, slot in zip(tables, slots, strict=True)
    ]
    return partial(model.forward, chunks, kv)


def measure(args: argparse.Namespace, folder: Path) -> None:
    dtype = getattr(torch, args.dtype)
    shape = SHAPES[args.shape]
    if args.layers:  # the head keeps its share of a step
        shape = replace(shape, layers=args.layers, vocab=shape.vocab * args.layers // shape.layers)
    checkpoint = write_checkpoint(shape, folder / "model", torch.device("cpu"), dtype)
    plain = LanguageModel.load(checkpoint, dtype=dtype, block_size=BLOCK_SIZE, weight_dtype=args.weight_dtype)
    print(f"model without adapters: {plain.weight_bytes / 1e6:.0f} MB")
    del plain
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    linears = {
        name: module
        for name, module in whole.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in name
    }
    folders = {
        str(i): str(write_adapter(linears, folder / "adapters" / str(i), args.rank))
        for i in range(args.adapters)
    }
    of_adapter = args.rank * sum(each.in_features + each.out_features for each in linears.values())
    del whole, linears
    adapters = read_adapters(folders, args.rank)
    room = AdapterRoom(args.adapters, args.room_rank, adapters, is_open=True)
    model = LanguageModel.load(
        checkpoint, dtype=dtype, block_size=BLOCK_SIZE, weight_dtype=args.weight_dtype, adapters=room
    )
    print(f"with room for {args.adapters} of rank {args.room_rank}: {model.weight_bytes / 1e6:.0f} MB")
    print_loading(model, adapters)
    kv = random_kv(model, STEPS)
    num_bytes = shape.num_weights * (1 if args.weight_dtype == "int8" else dtype.itemsize)
    print(f"{'step':20}{'without ms':>12}{'with ms':>12}{'price':>9}{'fastest':>9}{'bytes':>9}")
    clock = time.process_time if args.processor_time else time.perf_counter
    for step in STEPS:
        times = in_turns(
            [work_of(model, kv, step, number) for number in (0, args.adapters)], args.seconds, clock
        )
        (without_s, with_s), (least_s, least_with_s) = map(statistics.median, times), map(min, times)
        read = min(step.batch, args.adapters) * of_adapter * dtype.itemsize / num_bytes
        print(
            f"{step.name:20}{1e3 * without_s:12.2f}{1e3 * with_s:12.2f}{with_s / without_s - 1:9.1%}"
            f"{least_with_s / least_s - 1:9.1%}{read:9.1%}",
            flush=True,
        )


def print_loading(model: LanguageModel, adapters: list[Adapter]) -> None:
    """What it takes to load an adapter into a running worker."""
    reading, writing = [], []
    for slot, adapter in enumerate(adapters, 1):
        times = [time.perf_counter()]
        updates = model.read_adapter(adapter)
        times.append(time.perf_counter())
        model.write_adapter(slot, updates)
        times.append(time.perf_counter())
        reading.append(times[1] - times[0])
        writing.append(times[2] - times[1])
    print(
        f"beside the steps an adapter is read in {statistics.median(reading):.2f} s, and converted and "
        f"written in {statistics.median(writing):.2f} s"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--layers", type=int, default=0, help="so many of its layers; 0: all")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--room-rank", type=int, default=64, help="the largest rank that there is room for")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--weight-dtype", default="auto", choices=("auto", "int8"))
    parser.add_argument("--processor-time", action="store_true", help="of one thread")
    args = parser.parse_args()
    if args.processor_time:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
