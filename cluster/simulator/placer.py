"""Between a simulated door's flow and its routing policy: the router's own placer, with what only a
simulation knows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.simulator.admission import NO_CAPACITY
from cluster.types.media import MediaItem
from cluster.types.request import GenerateRequest
from router.admission.queue import AdmissionTicket, Capacity, Reported
from router.flow.placer import Placer
from router.flow.state import ClientRequest
from router.policy import Policy, Prediction, RequestView

if TYPE_CHECKING:
    from cluster.simulator.door import SimDoor
    from cluster.simulator.simulation import Simulation

# For admission control that reads neither.
NOTHING_REPORTED = Reported()
ANY_TICKET = AdmissionTicket("", "", "", True, 0.0, 0, 0.0, 0.0)


class SimPlacer(Placer):
    """Names blocks by the keys of the workload."""

    def __init__(self, door: SimDoor, simulation: Simulation, policy: Policy, has_admission: bool):
        """`has_admission`: false where every request is admitted at once: what admission would read is not
        computed then."""
        super().__init__(policy, door.cluster, simulation.model.block_size)
        self._door, self._has_admission = door, has_admission

    def capacity(self) -> Capacity:
        return super().capacity() if self._has_admission else NO_CAPACITY

    def reported(self) -> Reported:
        return super().reported() if self._has_admission else NOTHING_REPORTED

    def ticket(
        self, client: ClientRequest, prediction: Prediction, class_name: Callable[[int], str]
    ) -> AdmissionTicket:
        return super().ticket(client, prediction, class_name) if self._has_admission else ANY_TICKET

    def view(
        self,
        request: GenerateRequest,
        items: Sequence[MediaItem],
        hashes: Sequence[bytes],
        avoided: frozenset[str] = frozenset(),
    ) -> RequestView:
        """For another attempt the flow has hashed token ids, which mean nothing here."""
        hashes = self._door.client_of(request.request_id).request.block_hashes
        return super().view(request, items, hashes, avoided)
