"""Policies by the names that the records and tables of this folder have for them."""

from __future__ import annotations

from bench.router.one_device import OneDevice, OneDeviceRoundRobin
from bench.router.oracle import Oracle
from deploy.simulator.simulation import MakePolicy
from router.policy import make_policy

ORACLE, WHOLE, WHOLE_IN_TURN = "oracle", "data_parallel", "data_parallel_in_turn"
SEERS: dict[str, MakePolicy] = {ORACLE: Oracle, WHOLE: OneDevice, WHOLE_IN_TURN: OneDeviceRoundRobin}
BASELINES = {
    "least_loaded": "router.policy.baselines:LeastLoadedPolicy",
    "round_robin": "router.policy.baselines:RoundRobinPolicy",
    "per_stage": "router.policy.baselines:PerStagePolicy",
    "linear": "router.policy.baselines:LinearPolicy",
}


def setting_of(name: str) -> str:
    """The value of `door.policy` for a door that has the policy."""
    return BASELINES.get(name, name)


def maker(name: str) -> MakePolicy:
    """The policy's maker for a simulated door. `name`: of a policy above, or a value of `door.policy`. Raises
    ConfigError."""
    if name in SEERS:
        return SEERS[name]
    setting = setting_of(name)
    make_policy(setting)
    return lambda _: make_policy(setting)
