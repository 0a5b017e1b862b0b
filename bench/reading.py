"""How long a text model's weights take to load, against reading the same files: with nothing of them in the
page cache, and with all.

    python -m bench.reading MODEL --dtype bfloat16 --rounds 5

A round reads and loads by turns, in one process; a first load is not counted. Reading is four threads that
copy 8 MiB at a time into memory of their own. A load ends when every weight is in the device's memory and
known to be finite; what kernels do with the weights then, e.g. pack them, is not part of it.
Linux only: the files' pages are dropped by `posix_fadvise`, which leaves those that other processes map.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.arguments import parser_of
from bench.tables import head
from cluster.model.loading import Half, load_half

NUM_THREADS, PIECE_BYTES = 4, 8 << 20


def read_s(files: Sequence[Path]) -> float:
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, PIECE_BYTES)]

    def read(share: int) -> None:
        memory = bytearray(PIECE_BYTES)
        for file, at in pieces[share::NUM_THREADS]:
            with file.open("rb", buffering=0) as content:
                os.preadv(content.fileno(), [memory], at)

    started_at = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(read, range(NUM_THREADS)))
    return time.perf_counter() - started_at


def load_s(folder: Path, dtype: torch.dtype, device: torch.device) -> float:
    started_at = time.perf_counter()
    model = load_half(folder, Half.LANGUAGE, dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started_at
    del model
    gc.collect()  # modules refer to each other
    return seconds


def drop(files: Sequence[Path]) -> None:
    """Takes the files out of the page cache."""
    for file in files:
        with file.open("rb") as content:
            os.fsync(content.fileno())
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    folder: Path, dtype: torch.dtype, device: torch.device, rounds: int
) -> Iterator[tuple[str, list[float], list[float]]]:
    """Seconds of each round's reading and loading, for files outside of the page cache and in it."""
    files = sorted(folder.glob("*.safetensors"))
    load_s(folder, dtype, device)

    def timed(prepare: Callable[[Sequence[Path]], object], run: Callable[[], float]) -> float:
        prepare(files)
        return run()

    for what, prepare in (("from the disk", drop), ("from the page cache", read_s)):
        pairs = [
            (
                timed(prepare, lambda: read_s(files)),
                timed(prepare, lambda: load_s(folder, dtype, device)),
            )
            for _ in range(rounds)
        ]
        yield what, [read for read, _ in pairs], [load for _, load in pairs]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    num_bytes = sum(file.stat().st_size for file in args.model.glob("*.safetensors"))
    print(f"{args.model.name}, {num_bytes / 1e9:.2f} GB of files, in {args.dtype}; seconds, median (range)")
    print(*head("", "read", "load", "load ÷ read, median of rounds"), sep="\n")
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    for what, reads, loads in measure(args.model, dtype, device, args.rounds):
        ratio = statistics.median(load / read for load, read in zip(loads, reads, strict=True))
        print(f"| {what} | {_seconds(reads)} | {_seconds(loads)} | {ratio:.2f} |", flush=True)


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
