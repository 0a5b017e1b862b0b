"""What a decision costs: CPU time of the joint policy over large pools, with queues of any length, for text
and for images; and what the limit to what it looks at loses, which is found by looking at (nearly)
everything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from statistics import fmean, median

from bench.records import Record
from bench.tables import head
from cluster.types.media import Modality
from cluster.types.members import Role
from cluster.types.messages import LoadReport
from deploy.simulator.hardware import BLOCK_SIZE, H200, VL_7B
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import percentile
from deploy.simulator.simulation import SCHEDULING
from router.policy import ClusterView, ItemView, JointPolicy, RequestView, Worker
from router.policy.estimate import Estimate
from router.policy.search import Search

MOST_QUEUED = {Role.ENCODE: 8000, Role.PREFILL: 16_000, Role.DECODE: 64}  # units
NUM_WARM_UP = 10
NUM_UNLIMITED, UNLIMITED_STEPS = 10, 100_000  # searches without limit; a second each at four images
MOST_UNLIMITED = 64  # workers per pool for which that is done


def decisions(num_workers: int, num_decisions: int = 200, seed: int = 0) -> list[Record]:
    """A record for each kind of request; `num_workers`: of each pool."""
    rng, policy = Random(seed), JointPolicy()
    found = []
    for num_images in (0, 1, 2, 4):
        cluster = loaded_cluster(num_workers, rng)
        requests = [a_request(f"{num_images}/{number}", num_images, rng) for number in range(num_decisions)]
        took_ms = []
        for number, request in enumerate(requests):
            began_s = time.process_time()
            policy.decide(request, cluster, 1.0 + number / 1000)
            took_ms.append(1e3 * (time.process_time() - began_s))
        losses = (
            [loss(request, cluster) for request in requests[:NUM_UNLIMITED]]
            if num_workers <= MOST_UNLIMITED
            else []
        )
        found.append(
            {
                "type": "decision",
                "workers_per_pool": num_workers,
                "images": num_images,
                "p50_ms": round(median(took_ms[NUM_WARM_UP:]), 3),
                "p99_ms": round(percentile(took_ms[NUM_WARM_UP:], 0.99), 3),
                "loss": round(fmean(losses), 5) if losses else None,
            }
        )
    return found


def loss(request: RequestView, cluster: ClusterView) -> float:
    """The part by which the cost of the placement that is found exceeds that of the best of many more."""
    estimate = Estimate(request, cluster, 1.0)
    best = Search(estimate, len(cluster.prefills), UNLIMITED_STEPS).best()
    return Search(estimate).best().cost_s / best.cost_s - 1


def loaded_cluster(num_workers: int, rng: Random) -> ClusterView:
    """Equal workers with queues of any length."""
    cluster = ClusterView(SCHEDULING, VL_7B.kv_bytes_per_token, VL_7B.num_layers)
    for spec in workers(Layout(num_workers, num_workers, num_workers), VL_7B, H200):
        worker = Worker(spec.replica_id, spec.role, spec.num_blocks, spec.hardware, tuple(spec.curves.encode))
        cluster.add(worker)
        cluster.measured(spec.replica_id, spec.curves)
        num_requests = rng.randint(0, 8)
        num_units = rng.randint(1, MOST_QUEUED[spec.role]) if num_requests else 0
        cluster.reported(
            spec.replica_id, LoadReport(num_waiting=num_requests, num_queued_units=num_units), 1.0
        )
    return cluster


def a_request(name: str, num_images: int, rng: Random) -> RequestView:
    start, media = rng.randint(100, 3000), []
    for idx in range(num_images):
        rows = rng.randint(200, 1500)
        media.append(
            ItemView(f"{name}-{idx}", Modality.IMAGE, rows, rows * VL_7B.bytes_per_row, start, start + rows)
        )
        start += rows
    num_blocks = start // BLOCK_SIZE
    hashes = [f"{name}/{idx}".encode() for idx in range(num_blocks)]
    return RequestView(
        name,
        start + 16,
        BLOCK_SIZE,
        hashes,
        media,
        num_prefill_blocks=num_blocks,
        num_decode_blocks=num_blocks,
    )


def table(records: Sequence[Record]) -> list[str]:
    """Markdown."""
    lines = head("workers per pool", "images", "p50, ms", "p99, ms", "cost above the least")
    for each in records:
        lost = "" if each["loss"] is None else f"{each['loss']:.2%}"
        took = f"{each['p50_ms']:.2f} | {each['p99_ms']:.2f}"
        lines.append(f"| {each['workers_per_pool']} | {each['images']} | {took} | {lost} |")
    return lines
