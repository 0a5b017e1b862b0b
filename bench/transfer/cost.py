"""How long transfer threads wait for the interpreter's lock.

One lease at a time, of a prompt of 173 tokens with 24 layers, between two running transfer threads, next to a
thread that computes in Python without a pause, as an engine between two steps. For each
`sys.setswitchinterval`: from `finish` to the owner's event, and the turns of that thread.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import torch

from bench.tables import head, row
from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.lease.transfer_engine import TransferEngine

LAYERS, BLOCK_SIZE, TOKENS = 24, 16, 173
LAYOUT = MemoryLayout(kv_segments([(2, 64)] * (2 * LAYERS), BLOCK_SIZE, torch.bfloat16))
PER_LEASE = -(-TOKENS // BLOCK_SIZE)
SWITCH_INTERVALS_S = (0.005, 0.001, 0.0005, 0.0001)
HANDOVERS = 40


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


def report() -> None:
    torch.set_num_threads(1)
    print(*head("switch interval ms", "hand-over ms: median", "p90", "turns of the other a second"), sep="\n")
    for interval_s in SWITCH_INTERVALS_S:
        found = switching(interval_s)
        print(row(f"{value:.1f}" for value in found.values()), flush=True)
