"""Connects a simulated door's flow with its routing policy: the router's own placer, with what only a
simulation knows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.admission.queue import Capacity, Reported
from router.flow.placer import Placer
from router.policy import Policy

if TYPE_CHECKING:
    from deploy.simulator.door import SimDoor
    from deploy.simulator.simulation import Simulation

UNLIMITED, NO_LOAD = Capacity(1e9, 1e9, 1 << 60), Reported()  # every request is admitted at once


class SimPlacer(Placer):
    """Admits every request at once, if a simulation has no admission."""

    def __init__(self, door: SimDoor, simulation: Simulation, policy: Policy, has_admission: bool):
        """`has_admission`: false where every request is admitted at once."""
        super().__init__(policy, door.cluster, simulation.model.block_size)
        self._door, self._has_admission = door, has_admission

    def capacity(self) -> Capacity:
        return super().capacity() if self._has_admission else UNLIMITED

    def reported(self) -> Reported:
        return super().reported() if self._has_admission else NO_LOAD
