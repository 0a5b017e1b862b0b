"""What leases cost the transfer threads themselves, and how long they wait for the interpreter's lock.

    python -m bench.transfer cost [--against CHECKOUT]     a checkout of another version, measured in turn

`thread`: 16 prompts at once, each of 173 tokens with 24 layers, written layer by layer over the in-process
agent and stepped by hand. Per lease, of both sides: how often the thread takes one of its locks, torch's
operators (each is a launch on a GPU), descriptors, and microseconds of its own Python: its CPU time without
the calls that move or sum bytes. Then when the first and the last of the 16 ends.

`switching`: one lease at a time between two running transfer threads, next to a thread that computes in
Python without a pause, as an engine between two steps. For each `sys.setswitchinterval`: from `finish` to the
owner's event, and the turns of that thread.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.codecs import checksum
from kv_transfer.lease.transfer_engine import TransferEngine

LAYERS, BLOCK_SIZE, TOKENS, LEASES = 24, 16, 173, 16
LAYOUT = MemoryLayout(kv_segments([(2, 64)] * (2 * LAYERS), BLOCK_SIZE, torch.bfloat16))
PER_LEASE = -(-TOKENS // BLOCK_SIZE)
NUM_BLOCKS = LEASES * PER_LEASE
ROUNDS, VERSIONS_ROUNDS = 7, 2
SWITCH_INTERVALS_S = (0.005, 0.001, 0.0005, 0.0001)
HANDOVERS = 40


class _Counts:
    def __init__(self) -> None:
        self.locks = self.operators = self.descriptors = 0
        self.away_s = 0.0  # in calls that move or sum bytes


class _CountedLock:
    def __init__(self, lock: Any, counts: _Counts):
        self._lock, self._counts = lock, counts

    def __enter__(self) -> Any:
        self._counts.locks += 1
        return self._lock.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._lock.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: _Counts):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._counts.operators += 1
        return func(*args, **(kwargs or {}))


def _away(owner: Any, name: str, counts: _Counts) -> Any:
    call = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            counts.away_s += time.thread_time() - start

    return mock.patch.object(owner, name, timed)


@contextmanager
def _counted_locks(counts: _Counts) -> Iterator[None]:
    """Counts the locks of objects that are made inside."""
    lock, rlock = threading.Lock, threading.RLock
    with (
        mock.patch.object(threading, "Lock", lambda: _CountedLock(lock(), counts)),
        mock.patch.object(threading, "RLock", lambda: _CountedLock(rlock(), counts)),
    ):
        yield


def _round(number: int) -> dict[str, float]:
    counts, network, ends = _Counts(), InProcessNetwork(), []
    source, target = BlockMemory(LAYOUT, NUM_BLOCKS), BlockMemory(LAYOUT, NUM_BLOCKS)
    source.buffer.random_(0, 256)
    target.buffer.zero_()
    with _counted_locks(counts):
        agents: list[Any] = [network.agent("writer"), network.agent("owner")]
        writer = TransferEngine(agents[0], SystemClock(), lambda event: None, outgoing=source)
        owner = TransferEngine(
            agents[1], SystemClock(), lambda event: ends.append(time.perf_counter()), incoming=target
        )
    post = agents[0].post

    def counted_post(peer: str, local: Any, *rest: Any) -> Any:
        counts.descriptors += len(local)
        return post(peer, local, *rest)

    agents[0].post = counted_post
    for lease in range(LEASES):
        blocks = range(lease * PER_LEASE, (lease + 1) * PER_LEASE)
        grant = owner.grant(f"{number} {lease}", blocks, [0] * PER_LEASE, 60.0)
        outgoing = writer.open(grant.received(time.monotonic()))
        for layer in range(LAYERS):
            outgoing.write(blocks, range(PER_LEASE), [2 * layer, 2 * layer + 1])
        outgoing.finish(b"payload")
    counts.locks = 0
    with _away(agents[0], "post", counts), _away(checksum, "checksum", counts), _Operators(counts):
        start, cpu = time.perf_counter(), time.thread_time()
        while len(ends) < LEASES:
            writer.step()
            owner.step()
        own_s = time.thread_time() - cpu - counts.away_s
    return {
        "locks": counts.locks / LEASES,
        "operators": counts.operators / LEASES,
        "descriptors": counts.descriptors / LEASES,
        "own_us": 1e6 * own_s / LEASES,
        "first_ms": 1e3 * (ends[0] - start),
        "last_ms": 1e3 * (ends[-1] - start),
    }


def thread() -> dict[str, float]:
    """Medians."""
    rounds = [_round(number) for number in range(ROUNDS)]
    return {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}


def switching(interval_s: float) -> dict[str, float]:
    network, arrived, is_over, turns = InProcessNetwork(), threading.Event(), threading.Event(), [0]
    source, target = BlockMemory(LAYOUT, PER_LEASE), BlockMemory(LAYOUT, PER_LEASE)
    writer = TransferEngine(network.agent("writer"), SystemClock(), lambda event: None, outgoing=source)
    owner = TransferEngine(
        network.agent("owner"), SystemClock(), lambda event: arrived.set(), incoming=target
    )

    def compute() -> None:
        while not is_over.is_set():
            sum(i * i for i in range(1000))
            turns[0] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    busy = threading.Thread(target=compute)
    for each in (writer, owner, busy):
        each.start()
    seconds, start = [], time.perf_counter()
    for number in range(HANDOVERS):
        arrived.clear()
        grant = owner.grant(f"{interval_s} {number}", range(PER_LEASE), [0] * PER_LEASE, 60.0)
        outgoing = writer.open(grant.received(time.monotonic()))
        outgoing.write(range(PER_LEASE), range(PER_LEASE))
        begin = time.perf_counter()
        outgoing.finish(b"payload")
        arrived.wait(30.0)
        seconds.append(time.perf_counter() - begin)
    took_s = time.perf_counter() - start
    is_over.set()
    busy.join()
    writer.close(1.0)
    owner.close(1.0)
    sys.setswitchinterval(before)
    return {
        "interval_ms": 1e3 * interval_s,
        "handover_ms": 1e3 * statistics.median(seconds),
        "p90_ms": 1e3 * statistics.quantiles(seconds, n=10)[-1],
        "turns_per_s": turns[0] / took_s,
    }


def _of(checkout: Path) -> list[dict[str, float]]:
    """This file, run over the packages of a checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    output = subprocess.run(
        [sys.executable, __file__], cwd=checkout, env=environment, check=True, capture_output=True, text=True
    ).stdout
    return json.loads(output)


def report(against: Path | None) -> None:
    here = Path(__file__).parents[2]
    checkouts = {"before": against, "here": here} if against is not None else {"here": here}
    print("| version | locks | operators | descriptors | own Python µs | first end ms | last end ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    switched: dict[str, list[dict[str, float]]] = {}
    for _ in range(VERSIONS_ROUNDS):
        for name, checkout in checkouts.items():
            costs, *switched[name] = _of(checkout)
            print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in costs.values()) + " |", flush=True)
    print("\n| version | switch interval ms | hand-over ms: median · p90 | turns of the other a second |")
    print("| --- | --- | --- | --- |")
    for name, rows in switched.items():
        for row in rows:
            print(
                f"| {name} | {row['interval_ms']:.1f} | {row['handover_ms']:.1f} · {row['p90_ms']:.1f} "
                f"| {row['turns_per_s']:.0f} |"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([thread(), *map(switching, SWITCH_INTERVALS_S)]))
