"""Policies by name, for a simulated door."""

from __future__ import annotations

import numpy as np

from cluster.simulator.oracle import Oracle
from cluster.simulator.simulation import MakePolicy, Simulation
from cluster.simulator.whole import OneDevice, OneDeviceRoundRobin
from router.policy import ClusterView, Decision, JointPolicy, Placement, Policy, RequestView
from router.policy.estimate import Estimate
from router.policy.registry import policy_class
from router.policy.search import Search

ORACLE, WHOLE, WHOLE_IN_TURN = "oracle", "data_parallel", "data_parallel_in_turn"
TOGETHER = "bench.router.policies:Together"
SEERS: dict[str, MakePolicy] = {ORACLE: Oracle, WHOLE: OneDevice, WHOLE_IN_TURN: OneDeviceRoundRobin}


class Together(JointPolicy):
    """The joint policy, but the worker that computes a prompt generates the answer."""

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        estimate = Estimate(request, cluster, now)
        estimate.prefills.takes_any = np.zeros_like(estimate.prefills.takes_any)  # for others
        best = Search(estimate).best()
        encoders = tuple(cluster.encoders.replica_ids[encoder] for encoder in best.encoders)
        worker = cluster.prefills.replica_ids[best.prefill]
        placement = Placement(encoders, worker, worker)
        return Decision(placement, estimate.prediction(placement))


def maker(name: str) -> MakePolicy:
    """`name`: of a policy above, or what `make_policy` takes. Raises ConfigError for any other."""
    if name in SEERS:
        return SEERS[name]
    make = policy_class(name)

    def made(simulation: Simulation) -> Policy:
        return make()

    return made
