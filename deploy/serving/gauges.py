"""What Ray's exporter shows of a replica, and so the boards of Ray's dashboard. Serve adds the labels
`application`, `deployment` and `replica`. Set with each health check, every few seconds, on the replica's
event loop; `/metrics` of the doors has much more (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ray.serve import metrics

from cluster.clock import Clock, SystemClock
from cluster.types.messages import LoadReport


class WorkerGauges:
    def __init__(self, num_blocks: int, clock: Clock | None = None):
        """`num_blocks`: that the worker has for requests."""
        self._num_blocks, self._clock = num_blocks, clock or SystemClock()
        self._busy_s, self._at = inf, self._clock.now()  # what it computed before counts for nothing
        self._busy = metrics.Gauge(
            "epdg_replica_busy_ratio", "Part of the last seconds in which the worker computed steps"
        )
        self._memory = metrics.Gauge(
            "epdg_replica_memory_used_ratio",
            "Part of its blocks (KV, encoder: embeddings) that requests hold",
        )
        self._running = metrics.Gauge(
            "epdg_replica_requests_running", "Requests (encoder: media items) that it works on"
        )
        self._waiting = metrics.Gauge(
            "epdg_replica_requests_waiting", "Requests (items) that wait there for memory, embeddings or KV"
        )

    def set(self, loads: Sequence[LoadReport]) -> None:
        """`loads`: of each of its engines. Those of one worker take turns on its device."""
        now, busy_s = self._clock.now(), sum(load.busy_s for load in loads)
        if now > self._at:
            self._busy.set(min(1.0, max(0.0, busy_s - self._busy_s) / (now - self._at)))
        self._busy_s, self._at = busy_s, now
        self._memory.set(max(load.num_used_blocks for load in loads) / max(1, self._num_blocks))
        self._running.set(sum(load.num_running for load in loads))
        self._waiting.set(sum(load.num_waiting for load in loads))


class DoorGauges:
    def __init__(self) -> None:
        self._running = metrics.Gauge("epdg_door_requests_running", "Requests of this door in work")
        self._waiting = metrics.Gauge(
            "epdg_door_requests_waiting", "Requests that wait at this door for admission"
        )

    def set(self, num_running: int, num_waiting: int) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
