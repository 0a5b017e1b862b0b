"""Connects a simulated door's flow with its routing policy: the router's own placer, for simulations without
admission, too. Pure."""

from __future__ import annotations

from router.admission.queue import Capacity, Reported
from router.flow.placer import Placer
from router.policy import ClusterView, Policy

UNLIMITED, NO_LOAD = Capacity(1e9, 1e9, 1 << 60), Reported()  # every request is admitted at once


class SimPlacer(Placer):
    """It admits every request at once where there is no admission (`has_admission`)."""

    def __init__(self, policy: Policy, cluster: ClusterView, block_size: int, has_admission: bool):
        super().__init__(policy, cluster, block_size)
        self._has_admission = has_admission

    def capacity(self) -> Capacity:
        return super().capacity() if self._has_admission else UNLIMITED

    def reported(self) -> Reported:
        return super().reported() if self._has_admission else NO_LOAD
