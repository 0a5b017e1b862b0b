"""Simulated replicas, as they are described, and as doors see them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.types.curves import Link, ServiceCurves
from cluster.types.members import Member, Role
from deploy.simulator.hardware import PREPARE_THREADS, Model


@dataclass(frozen=True)
class WorkerSpec:
    """One replica. `curves` is how fast it is.

    encoder               of a worker that encodes and has other phases: how fast its encoder is
    reported              how fast it says that it is; None: what it measures
    ready_at              when it has started, in seconds of the run
    dies_at               when it is killed, if at all
    throttled             (from when, so many times slower), if at all
    step_target_s         prompts: no step of more than a block is planned to last longer
    cache_bytes           encoder: for embeddings
    feature_bytes         prompts: for embeddings that come
    max_items             encoder: in one call
    num_prepare_threads   encoder
    max_batch             decode: sequences in one step
    """

    replica_id: str
    role: Role
    curves: ServiceCurves
    num_blocks: int = 0
    hardware: str = ""
    bytes_per_row: int = 0
    encoder: ServiceCurves | None = None
    reported: ServiceCurves | None = None
    step_target_s: float = math.inf
    cache_bytes: int = 4 << 30
    feature_bytes: int = 4 << 30
    max_items: int = 16
    num_prepare_threads: int = PREPARE_THREADS
    max_batch: int = 256
    ready_at: float = 0.0
    dies_at: float | None = None
    throttled: tuple[float, float] | None = None

    @property
    def encoder_curves(self) -> ServiceCurves:
        return self.encoder or self.curves

    def link(self, replica_id: str) -> Link:
        return self.curves.links.get(replica_id) or self.curves.links[""]


def member(spec: WorkerSpec, model: Model) -> Member:
    """The worker as doors see it."""
    return Member(
        replica_id=spec.replica_id,
        role=spec.role,
        address="",
        model=model.name,
        layout="",
        num_blocks=spec.num_blocks,
        modalities=tuple(spec.encoder_curves.encode),
        hardware=spec.hardware,
        block_bytes=model.kv_bytes_per_token * model.block_size,
        state_blocks=model.state_blocks,
        num_layers=model.num_layers,
        row_bytes=spec.bytes_per_row,
    )
