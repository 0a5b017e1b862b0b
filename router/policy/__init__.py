"""Where a request goes, and why: pure, driven alike by the door and by the simulator.

    views        a request, a placement, a prediction
    cluster      what is known of the workers; made of `pool`, `links`, `index`, `pending`, `calibration`
    predict      what a placement of one request takes and costs; made of `at_encoders`, `at_prefills`, `at_decodes`
    joint        the placement of least cost, found by `search`
    baselines    policies to compare it with

No torch, asyncio, Ray or clock: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from router.policy.baselines import LeastLoadedPolicy, LinearPolicy, PerStagePolicy, RoundRobinPolicy
from router.policy.calibration import CalibrationStatistics
from router.policy.cluster import ClusterView
from router.policy.joint import JointPolicy
from router.policy.views import (
    Decision,
    ItemPrediction,
    ItemView,
    Placement,
    Prediction,
    RequestView,
    Worker,
)


class Policy(Protocol):
    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        """Raises UnavailableError, naming the empty pool, and RequestError if nobody can hold the request."""
        ...

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        """An item's next encoder after a failure. Raises UnavailableError when there is no other."""
        ...


POLICIES: dict[str, Callable[[], Policy]] = {
    "joint": JointPolicy,
    "least_loaded": LeastLoadedPolicy,
    "round_robin": RoundRobinPolicy,
    "per_stage": PerStagePolicy,
    "linear": LinearPolicy,
}

__all__ = [
    "POLICIES",
    "CalibrationStatistics",
    "ClusterView",
    "Decision",
    "ItemPrediction",
    "ItemView",
    "JointPolicy",
    "Placement",
    "Policy",
    "Prediction",
    "RequestView",
    "Worker",
]
