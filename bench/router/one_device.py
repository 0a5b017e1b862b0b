"""Data parallelism, to compare with: one device encodes, prefills and decodes all of a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cluster.engine.state import LanguagePhase
from cluster.errors import UnavailableError
from cluster.types.members import Phase
from router.policy import ClusterView, Decision, ItemPrediction, ItemView, Placement, Prediction, RequestView

if TYPE_CHECKING:
    from deploy.simulator.simulation import Simulation
    from deploy.simulator.worker import SimWorker

# A request without its first token counts like so many with it, as in vLLM's data-parallel balancer.
WAITING_WEIGHT = 4


def unpredicted(num_items: int) -> Prediction:
    """The prediction of a policy that predicts nothing."""
    items = (ItemPrediction(),) * num_items
    nothing = (0.0,) * 8  # of each duration
    return Prediction(*nothing, items=items)


class OneDevice:
    """The device with the fewest requests, by their true numbers, without delay: better than a real balancer
    can know."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        left = self._simulation.alive(Phase.DECODE)
        if not left:
            raise UnavailableError("no device is left")
        name = min(left, key=lambda name: (self._load(left[name]), name))
        num_items = len(request.media)
        return Decision(Placement((name,) * num_items, name, name), unpredicted(num_items))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        raise UnavailableError("the device is gone")

    def _load(self, worker: SimWorker) -> int:
        phases = [request.phase for request in worker.requests.values()]
        num_running = phases.count(LanguagePhase.RUNNING)
        return WAITING_WEIGHT * (len(phases) - num_running) + num_running


class OneDeviceRoundRobin(OneDevice):
    """One device after the other, whatever they have to do: what a Kubernetes service does."""

    def __init__(self, simulation: Simulation):
        super().__init__(simulation)
        self._num_placed = 0

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        self._num_placed += 1
        return super().decide(request, cluster, now)

    def _load(self, worker: SimWorker) -> int:
        names = list(self._simulation.alive(Phase.DECODE))
        return (names.index(worker.replica_id) - self._num_placed) % len(names)
