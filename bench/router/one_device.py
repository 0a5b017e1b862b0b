"""Data parallelism, to compare with: one device encodes, prefills and decodes all of a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cluster.errors import UnavailableError
from router.policy import ClusterView, Decision, ItemPrediction, ItemView, Placement, Prediction, RequestView

if TYPE_CHECKING:
    from cluster.simulator.language import SimLanguage
    from cluster.simulator.simulation import Simulation

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
        left = [worker for worker in self._simulation.decodes.values() if not worker.is_dead]
        if not left:
            raise UnavailableError("no device is left")
        name = min(left, key=lambda worker: (self._load(worker), worker.spec.replica_id)).spec.replica_id
        num_items = len(request.media)
        return Decision(Placement((name,) * num_items, name, name), unpredicted(num_items))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        raise UnavailableError("the device is gone")

    def _load(self, worker: SimLanguage) -> int:
        return WAITING_WEIGHT * (len(worker.held) - len(worker.answers)) + len(worker.answers)


class OneDeviceRoundRobin(OneDevice):
    """One device after the other, whatever they have to do: what a Kubernetes service does."""

    def __init__(self, simulation: Simulation):
        super().__init__(simulation)
        self._num_placed = 0

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        self._num_placed += 1
        return super().decide(request, cluster, now)

    def _load(self, worker: SimLanguage) -> int:
        names = list(self._simulation.decodes)
        return (names.index(worker.spec.replica_id) - self._num_placed) % len(names)
