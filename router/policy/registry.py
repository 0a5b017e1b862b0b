"""Policies by name or by import path, for the setting `door.policy` and for the simulator's command line.

joint                           the policy of this package
package.module:Class            any class that implements `Policy` and takes no arguments, for example
                                router.policy.baselines:LeastLoadedPolicy
"""

from __future__ import annotations

from collections.abc import Collection
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


JOINT = "router.policy.joint:JointPolicy"


def make_policy(name: str) -> Policy:
    """`name`: `joint` or an import path. Raises ConfigError if there is no such policy."""
    module, _, class_name = (JOINT if name == "joint" else name).partition(":")
    try:
        make = getattr(import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"no policy {name!r}: use joint, or an import path package.module:Class") from error
    return make()
