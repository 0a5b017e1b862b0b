"""What simulated workers have in common: their description, and the network between them and the doors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.simulator.events import EventLoop
from cluster.simulator.hardware import PREPARE_THREADS, Model
from cluster.types.curves import Link, ServiceCurves
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage
from cluster.types.transfer import Contract, Grant

if TYPE_CHECKING:
    from cluster.simulator.door import SimDoor

NETWORK_S = 5e-4  # a message between a door and a worker
ONE_TOKEN = (0,)  # simulated tokens have no meaning, only a number
# Simulated workers need no grant to write, so all grants are this one.
GRANT = Grant("simulated", b"", 0, 0, Contract(0, "", 0, (), "", ""), (), (), ttl_s=math.inf)


@dataclass(frozen=True)
class WorkerSpec:
    """One replica. `curves` is how fast it is.

    encoder               of a worker that encodes and has other phases: how fast its encoder is
    reported              how fast it says that it is; None: the truth
    ready_at              when it has started, in seconds of the run
    dies_at               when it is killed, if at all
    throttled             (from when, so many times slower), if at all; it measures that, too, a second later
    step_target_s         prompts: no step of more than a block is planned to last longer
    cache_bytes           encoder: for embeddings
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
    max_items: int = 16
    num_prepare_threads: int = PREPARE_THREADS
    max_batch: int = 256
    ready_at: float = 0.0
    dies_at: float | None = None
    throttled: tuple[float, float] | None = None

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
        modalities=tuple((spec.encoder or spec.curves).encode),
        hardware=spec.hardware,
        block_bytes=model.kv_bytes_per_token * model.block_size,
        num_layers=model.num_layers,
        row_bytes=spec.bytes_per_row,
    )


class Network:
    """A message reaches its door or worker `delay_s` later; messages overtake none that were sent before."""

    def __init__(self, loop: EventLoop, delay_s: float = NETWORK_S):
        self._loop, self.delay_s = loop, delay_s
        self.doors: Sequence[SimDoor] = ()

    def tell(self, call: Callable[..., object], *args: Any) -> None:
        """The call happens when the message has arrived."""
        self._loop.at(self._loop.now + self.delay_s, call, *args)

    def tell_doors(self, replica_id: str, *messages: AnyMessage) -> None:
        """A worker reports the same to all doors."""
        self._loop.at(self._loop.now + self.delay_s, self._deliver, replica_id, messages)

    def _deliver(self, replica_id: str, messages: Sequence[AnyMessage]) -> None:
        for door in self.doors:
            door.receive(replica_id, *messages)
