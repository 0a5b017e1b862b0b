"""What loading half a model costs: seconds, CPU seconds and memory, without the cache of packed weights, when
the file is written, and when it is mapped; and the memory of two workers at once.

    python -m bench.loading MODEL --dtype bfloat16 --half language

Every load runs in a process of its own. A worker's memory is proportional (PSS): a page that n processes map
counts one n-th in each. `step` is the fastest of some decode steps of one token. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.tables import head

NUM_STEPS = 20
MIB = 1 << 20


def child(args: argparse.Namespace) -> None:
    """Loads, says what it cost, waits for a line, says what it holds."""
    import torch

    from cluster.model.cpu.weight_cache import WeightCache
    from cluster.model.encoder import EncoderModel
    from cluster.model.language import LanguageModel

    cache = WeightCache(Path(args.cache), 64 << 30) if args.cache else None
    dtype = getattr(torch, args.dtype)
    before_mib = _memory()["Pss"]
    started_at, cpu_started_at = time.perf_counter(), time.process_time()
    if args.half == "encoder":
        model = EncoderModel.load(args.model, dtype=dtype, weight_cache=cache)
    else:
        model = LanguageModel.load(args.model, dtype=dtype, weight_cache=cache)
    said = {"s": time.perf_counter() - started_at, "cpu_s": time.process_time() - cpu_started_at}
    if isinstance(model, LanguageModel):
        said["step_ms"] = _step_ms(model)
    print(json.dumps(said), flush=True)
    sys.stdin.readline()
    memory = _memory()
    names = {"pss": "Pss", "anonymous": "Anonymous", "huge": "FilePmdMapped", "locked": "Locked"}
    print(
        json.dumps({"before": before_mib} | {ours: memory[name] for ours, name in names.items()}), flush=True
    )
    sys.stdin.readline()


def _step_ms(model) -> float:
    from cluster.kvcache.memory import BlockMemory

    kv = BlockMemory(model.kv_layout, 8)
    times = []
    for position in range(NUM_STEPS):
        started_at = time.perf_counter()
        model.decode([1], [position], [0], [[0, 1]], kv)
        times.append(time.perf_counter() - started_at)
    return 1e3 * min(times)


def _memory() -> dict[str, float]:
    """MiB by the names of /proc/self/smaps_rollup."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return {name: int(kib) / 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


class Worker:
    """A process that loads at once and holds the model until it is asked to end."""

    def __init__(self, args: argparse.Namespace, cache: str):
        command = [sys.executable, "-m", "bench.loading", args.model, "--child", "--cache", cache]
        command += ["--dtype", args.dtype, "--half", args.half]
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip

    def read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended: {self._process.wait()}")
        return json.loads(line)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self.go_on()
        self._process.wait()


def measure(args: argparse.Namespace, label: str, cache: str, num_workers: int = 1) -> None:
    """One line of the table: the slowest worker's seconds, the memory of all."""
    workers = [Worker(args, cache) for _ in range(num_workers)]
    loaded = [worker.read() for worker in workers]
    for worker in workers:
        worker.go_on()
    held = [worker.read() for worker in workers]
    for worker in workers:
        worker.end()
    seconds, cpu_s, step_ms = (
        max(load.get(name, 0.0) for load in loaded) for name in ("s", "cpu_s", "step_ms")
    )
    total = {name: sum(each[name] for each in held) for name in held[0]}
    print(
        f"| {label} | {seconds:.2f} | {cpu_s:.2f} | {total['pss']:,.0f} | {total['anonymous']:,.0f} | "
        f"{total['huge'] / num_workers:,.0f} | {total['locked'] / num_workers:,.0f} | {step_ms:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--half", choices=("language", "encoder"), default="language")
    parser.add_argument(
        "--folder", help="where the files lie meanwhile; default: the folder of temporary files"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    print(f"{Path(args.model).name}, {args.half} half, {args.dtype}")
    print(*head("", "s", "CPU s", "PSS, MiB", "anonymous", "on huge pages", "locked", "step, ms"), sep="\n")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, "no cache", "")
        measure(args, "the file is written", folder)
        measure(args, "the file is mapped", folder)
        measure(args, "two workers, no cache", "", 2)
        measure(args, "two workers, mapped", folder, 2)


if __name__ == "__main__":
    main()
