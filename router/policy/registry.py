"""Policies by name or by import path, for the setting `door.policy` and for the simulator's command line.

    joint                           the policy of this package
    package.module:Class            any class that implements `Policy` and takes no arguments, for example
                                    router.policy.baselines:LeastLoadedPolicy

The names of the comparison policies are aliases for one more release.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Protocol

from cluster.errors import ConfigError
from router.policy.cluster import ClusterView
from router.policy.views import Decision, ItemView, RequestView


class Policy(Protocol):
    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        """Raises UnavailableError with the empty pool, and RequestError if no worker is large enough."""
        ...

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        """An item's next encoder after a failure. Raises UnavailableError if there is no other."""
        ...


POLICIES = {"joint": "router.policy.joint:JointPolicy"}
BASELINES = {
    "least_loaded": "router.policy.baselines:LeastLoadedPolicy",
    "round_robin": "router.policy.baselines:RoundRobinPolicy",
    "per_stage": "router.policy.baselines:PerStagePolicy",
    "linear": "router.policy.baselines:LinearPolicy",
}


def make_policy(name: str) -> Policy:
    """`name`: a name above, or an import path. Raises ConfigError if there is no such policy."""
    return policy_class(name)()


def policy_class(name: str) -> Callable[[], Policy]:
    """See `make_policy`."""
    path = (POLICIES | BASELINES).get(name, name)
    module, _, class_name = path.partition(":")
    try:
        return getattr(import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(POLICIES)
        raise ConfigError(
            f"no policy {name!r}: use {known}, or an import path package.module:Class"
        ) from error
