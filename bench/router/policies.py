"""Policies by name, for a simulated door."""

from __future__ import annotations

from bench.router.one_device import OneDevice, OneDeviceRoundRobin
from bench.router.oracle import Oracle
from cluster.simulator.simulation import MakePolicy, Simulation
from router.policy import Policy
from router.policy.registry import policy_class

ORACLE, WHOLE, WHOLE_IN_TURN = "oracle", "data_parallel", "data_parallel_in_turn"
SEERS: dict[str, MakePolicy] = {ORACLE: Oracle, WHOLE: OneDevice, WHOLE_IN_TURN: OneDeviceRoundRobin}


def maker(name: str) -> MakePolicy:
    """`name`: of a policy above, or what `make_policy` takes. Raises ConfigError for any other."""
    if name in SEERS:
        return SEERS[name]
    make = policy_class(name)

    def made(simulation: Simulation) -> Policy:
        return make()

    return made
