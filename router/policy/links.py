"""How fast the workers of one pool write to those of another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cluster.types.curves import Link
from router.policy.pool import Floats, WorkerPool

UNMEASURED = Link(1e-3, 1e10)  # before the first transfer: fast, so that KV travels raw until more is known


class Speeds(NamedTuple):
    """For every reader and writer, and the best for each writer."""

    latency_s: Floats  # [readers, writers]
    s_per_byte: Floats
    least_latency_s: Floats  # [writers]
    least_s_per_byte: Floats


class Links:
    """A link that was never used counts as its writer's link to any reader, else as the mean."""

    def __init__(self, writers: WorkerPool, readers: WorkerPool, *, is_free_inside: bool = False):
        """`is_free_inside`: what stays in a worker takes no time."""
        self._writers = writers
        self._readers = readers
        self._is_free_inside = is_free_inside
        self._of_writer: dict[str, dict[str, Link]] = {}
        self._speeds: Speeds | None = None

    def measured(self, writer: str, links: dict[str, Link]) -> None:
        """`links`: by replica id of the reader; "" is any other reader."""
        if self._of_writer.get(writer, {}) != links:
            self._of_writer[writer] = links
            self._speeds = None

    def changed(self) -> None:
        """A worker of either pool has joined or left."""
        self._of_writer = {w: links for w, links in self._of_writer.items() if w in self._writers.slots}
        self._speeds = None

    @property
    def speeds(self) -> Speeds:
        if self._speeds is None:
            known = [links[""] for links in self._of_writer.values() if "" in links]
            default = _mean(known) if known else UNMEASURED
            shape = len(self._readers), len(self._writers)
            latency_s, s_per_byte = np.full(shape, default.latency_s), np.full(shape, 1 / default.bytes_per_s)
            for writer, links in self._of_writer.items():
                self._write(latency_s, s_per_byte, self._writers.slots[writer], links)
            for worker in self._readers.slots.keys() & self._writers.slots if self._is_free_inside else ():
                own = self._readers.slots[worker], self._writers.slots[worker]
                latency_s[own] = s_per_byte[own] = 0.0
            self._speeds = Speeds(latency_s, s_per_byte, _least(latency_s), _least(s_per_byte))
        return self._speeds

    def _write(self, latency_s: Floats, s_per_byte: Floats, writer: int, links: dict[str, Link]) -> None:
        if "" in links:
            latency_s[:, writer], s_per_byte[:, writer] = links[""].latency_s, 1 / links[""].bytes_per_s
        for replica_id, link in links.items():
            reader = self._readers.slots.get(replica_id)
            if reader is not None:
                latency_s[reader, writer], s_per_byte[reader, writer] = link.latency_s, 1 / link.bytes_per_s


def _mean(links: list[Link]) -> Link:
    """Averages seconds, not speeds."""
    latency_s = float(np.mean([link.latency_s for link in links]))
    return Link(latency_s, 1 / float(np.mean([1 / link.bytes_per_s for link in links])))


def _least(values: Floats) -> Floats:
    return values.min(0) if len(values) else np.zeros(values.shape[1])
