"""The cluster in virtual time: workers, doors, failures. One run is one object; nothing is shared between
runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from random import Random

from cluster.config.settings import AdmissionArgs
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.members import Phase
from cluster.types.messages import Measured
from deploy.simulator.door import SimDoor
from deploy.simulator.events import EventLoop, VirtualClock
from deploy.simulator.hardware import Model
from deploy.simulator.network import NETWORK_S, Network
from deploy.simulator.process import World
from deploy.simulator.results import Outcome
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.worker import SimWorker
from deploy.simulator.workload import SimRequest
from router.policy import ClusterView, Policy

# Of the cluster's defaults, with a speed of the simulated GPUs: 20,000 tokens count like a second of waiting.
SCHEDULING = SchedulingPolicy(aging_s=5.0, tokens_per_s=20_000, text_share=0.3)
NOISE = 0.03  # standard deviation of a step's duration, as a ratio

MakePolicy = Callable[["Simulation"], Policy]


class Simulation:
    """`policies`: makers of one for each door. `admission`: of each door; None: every request is admitted at
    once. `on_first`: called when a request's first token has come, with the time to it."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        policies: Sequence[MakePolicy],
        model: Model,
        seed: int = 0,
        noise: float = NOISE,
        scheduling: SchedulingPolicy = SCHEDULING,
        network_s: float = NETWORK_S,
        admission: AdmissionArgs | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_first: Callable[[SimRequest, float], None] | None = None,
    ):
        self.loop = EventLoop()
        clock = VirtualClock(self.loop)
        self.network = Network(self.loop, clock, network_s)
        self.world = World(self.network, self.loop, clock, model)
        self.model = model
        self.outcomes: list[Outcome] = []
        self.on_outcome = on_outcome or self.outcomes.append
        self.on_first = on_first
        self.has_arrivals = False  # requests are still to come
        self.scheduling = scheduling
        self._rng, self._noise = Random(f"noise {seed}"), noise
        self.workers: dict[str, SimWorker] = {}
        self._draining: dict[str, tuple[set[SimDoor], Callable[[str], None]]] = {}
        for spec in specs:
            self._make(spec)
        self.doors = [
            SimDoor(
                number,
                self,
                make(self),
                ClusterView(scheduling, model.kv_bytes_per_token, model.num_layers),
                admission,
            )
            for number, make in enumerate(policies)
        ]
        self.network.doors = self.doors
        for spec in specs:
            self._plan(spec)

    def run(
        self,
        requests: Iterable[SimRequest],
        until: float = float("inf"),
        doors: Sequence[SimDoor] | None = None,
    ) -> list[Outcome]:
        """Serve all requests, by these doors in turn; None: by all doors. Returns the outcomes in the order
        in which the requests ended."""
        self._arrivals = zip(cycle(doors or self.doors), requests, strict=False)
        self.has_arrivals = True
        self._next_arrival()
        self.loop.run(until)
        return self.outcomes

    def set_curves(self, replica_id: str, curves: ServiceCurves, reported: ServiceCurves) -> None:
        """How fast a worker with a single engine is from its next call on, as it has measured again; all
        doors learn at once what it reports."""
        worker = self.workers[replica_id]
        worker.measure(replace(worker.spec, curves=curves, reported=reported))
        self._each_door(SimDoor.receive, replica_id, Measured(reported))

    def add(self, spec: WorkerSpec) -> None:
        """A worker more, which is ready at its time or now."""
        self._make(spec)
        self._plan(spec)

    def retire(self, replica_id: str, on_gone: Callable[[str], None]) -> None:
        """The worker gets nothing new, and goes when its last request is done."""
        self._draining[replica_id] = (set(self.doors), on_gone)
        if self.workers[replica_id].spec.ready_at > self.loop.now:
            for door in self.doors:
                self.drained(door, replica_id)
        else:
            self._each_door(SimDoor.unlist, replica_id)

    def drained(self, door: SimDoor, replica_id: str) -> None:
        """No request of this door is left at a worker that retires."""
        waiting, on_gone = self._draining.get(replica_id, (set(), None))
        waiting.discard(door)
        if waiting or on_gone is None:
            return
        del self._draining[replica_id]
        self.workers.pop(replica_id).kill()
        self._each_door(SimDoor.lose, replica_id)
        on_gone(replica_id)

    def alive(self, phase: Phase) -> dict[str, SimWorker]:
        """The workers with this phase, by replica id."""
        pool = ((name, each) for name, each in self.workers.items() if phase in each.spec.role.phases)
        return {name: worker for name, worker in pool if not worker.is_dead}

    def _next_arrival(self) -> None:
        for door, request in self._arrivals:
            self.loop.at(max(self.loop.now, request.arrived_at), self._arrive, door, request)
            return
        self.has_arrivals = False

    def _arrive(self, door: SimDoor, request: SimRequest) -> None:
        self._next_arrival()
        door.submit(request)

    def _draw(self) -> float:
        return max(0.5, 1.0 + self._noise * self._rng.gauss(0.0, 1.0)) if self._noise else 1.0

    def _make(self, spec: WorkerSpec) -> None:
        self.workers[spec.replica_id] = SimWorker(spec, self.world, self.scheduling, self._draw)

    def _plan(self, spec: WorkerSpec) -> None:
        """The worker's start, its death and its throttling."""
        if spec.ready_at > self.loop.now:
            self.loop.at(spec.ready_at, self._join, spec)
        else:
            self._join(spec)
        if spec.dies_at is not None:
            self.loop.at(spec.dies_at, self._kill, spec)
        if spec.throttled is not None:
            since, factor = spec.throttled
            self.loop.at(since, self._throttle, spec, factor)

    def _join(self, spec: WorkerSpec) -> None:
        if spec.replica_id in self.workers:  # it has not gone before it was ready
            for door in self.doors:
                door.join(spec)
                self.workers[spec.replica_id].connect(door.number)

    def _each_door(self, call: Callable[..., object], *args: object) -> None:
        for door in self.doors:
            call(door, *args)

    def _kill(self, spec: WorkerSpec) -> None:
        if spec.replica_id not in self.workers:  # it has retired
            return
        self.workers[spec.replica_id].kill()
        self.network.tell(self._each_door, SimDoor.lose, spec.replica_id)

    def _throttle(self, spec: WorkerSpec, factor: float) -> None:
        if spec.replica_id in self.workers:  # it has not retired
            device = self.workers[spec.replica_id].device
            device.become(device.spec, factor)


def slowed(curve: Curve, factor: float, more_s: float = 0.0) -> Curve:
    """The curve whose calls take so many times longer, and then so much more each."""
    return Curve(factor * curve.fixed_s + more_s, factor * curve.per_unit_s, factor * curve.per_pair_s)
