"""Policies by name, for a simulated door."""

from __future__ import annotations

from cluster.simulator.oracle import Oracle
from cluster.simulator.simulation import MakePolicy, Simulation
from cluster.simulator.whole import OneDevice, OneDeviceInTurn
from router.policy import Policy, make_policy

ORACLE, WHOLE, WHOLE_IN_TURN = "oracle", "data_parallel", "data_parallel_in_turn"
SEERS: dict[str, MakePolicy] = {ORACLE: Oracle, WHOLE: OneDevice, WHOLE_IN_TURN: OneDeviceInTurn}


def maker(name: str) -> MakePolicy:
    """`name`: of a policy above, or what `make_policy` takes."""
    if name in SEERS:
        return SEERS[name]

    def made(simulation: Simulation) -> Policy:
        return make_policy(name)

    return made
