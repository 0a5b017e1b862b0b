"""The adapter between Ray Serve and the scaling policy. Runs in Serve's controller, which calls it about ten
times a second; the doors' reports come once a second.

The file of the application names it, and gives each pool its bounds (deploy/cluster-scaled.yaml):

    autoscaling_policy: {policy_function: "deploy.serving.scaling:ScalingPolicy", policy_kwargs: {…}}

`policy_kwargs` are the fields of `ScalingSettings`. Ways of the data:

* Doors → policy: `record_autoscaling_stats` of every door, which Serve collects. A door has every worker's
  load from the worker itself, so workers need not report here again.
* Policy → Serve: the number of replicas of each pool. Serve applies the bounds once more.
* Policy → workers: which phases the replicas of a pool of several phases shall do, through Ray's key-value
  store. Each of these workers reads it when Serve asks it for its statistics, and reports it to the doors,
  as for `phases_by_rank`. Without that store (`ray_internals`) each does all phases of its role.

Serve's controller must not get an exception from here: it would stop the scaling of other applications.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.util import metrics

from cluster.clock import SystemClock
from cluster.types.members import Role
from deploy.serving import ray_internals
from router.scaling import DoorReport, PoolState, Scaler, ScalingDecision, ScalingSettings, Snapshot
from router.scaling.phases import Phases

logger = logging.getLogger("ray.serve")  # the controller's own log

DOOR = "Door"
ROLES = {role.deployment: role for role in Role}
IN_TIME = "ttft_le_"  # and seconds: first tokens until then, as in the buckets of the door's histogram
_FIELDS = [field.name for field in fields(DoorReport)]

Contexts = Mapping[Any, AutoscalingContext]  # by DeploymentID


class ScalingPolicy:
    """Called with a context of every deployment that has an `autoscaling_config`."""

    def __init__(self, **settings: Any):
        self._scaler = Scaler(ScalingSettings(**settings))
        self._clock = SystemClock()
        self._assigned: dict[str, list[str]] = {}
        self._gauges = _ScalingGauges()
        self._has_door = True

    def __call__(self, contexts: Contexts) -> tuple[dict[Any, int], None]:
        try:
            return self._decide(contexts), None
        except Exception:  # at the edge of another's process
            logger.exception("an error in the scaling policy: no pool is scaled now")
            return {}, None

    def _decide(self, contexts: Contexts) -> dict[Any, int]:
        now = self._clock.now()
        if not self._scaler.is_due(now):
            return {}
        pools = {
            ROLES[each.deployment_name]: name
            for name, each in contexts.items()
            if each.deployment_name in ROLES
        }
        states = tuple(_state(role, contexts[name]) for role, name in pools.items())
        doors = self._doors(each for each in contexts.values() if each.deployment_name == DOOR)
        decision = self._scaler.decide(Snapshot(states, doors), now)
        if decision is None:
            return {}
        for change in decision.changes:
            logger.info("scaling: %s", change.text)
        self._gauges.set(decision)
        self._tell(contexts, decision.phases)
        return {pools[role]: target for role, target in decision.targets.items()}

    def _doors(self, contexts: Iterable[AutoscalingContext]) -> dict[str, DoorReport]:
        reports: dict[str, DoorReport] = {}
        has_door = False
        for context in contexts:
            has_door = True
            stats: dict[str, dict[str, float]] = {}
            for name, by_replica in (context.raw_metrics or {}).items():
                for replica, series in by_replica.items():
                    if series:
                        stats.setdefault(replica.unique_id, {})[name] = series[-1].value
            target_s = self._scaler.settings.target_ttft_s
            reports |= {door: _report(each, target_s) for door, each in stats.items() if _FIELDS[0] in each}
        if self._has_door and not has_door:
            logger.warning(
                "scaling: Door has no autoscaling_config, so the doors do not report; nothing is scaled"
            )
        self._has_door = has_door
        return reports

    def _tell(self, contexts: Contexts, phases: Mapping[str, Phases]) -> None:
        assigned: dict[str, list[str]] = {replica_id: sorted(each) for replica_id, each in phases.items()}
        if assigned != self._assigned:
            app = next(iter(contexts.values())).app_name
            try:
                ray_internals.put(f"phases {app}", json.dumps(assigned))
                logger.info("scaling: phases %s", assigned)
            except ray_internals.RayChanged as error:
                logger.warning("scaling: each worker does all phases of its role: %s", error)
            self._assigned = assigned


def door_stats(report: DoorReport, first_tokens: Mapping[float, float]) -> dict[str, float]:
    """What a door gives Serve. `first_tokens`: how many came within so many seconds; the last bound is
    infinite."""
    return asdict(report) | {f"{IN_TIME}{bound:g}": num for bound, num in first_tokens.items()}


def assigned_phases(app: str, replica_id: str) -> list[str] | None:
    """What the policy wants of this replica; None: all phases of its role. Blocks for a call to Ray."""
    try:
        value = ray_internals.get(f"phases {app}")
    except ray_internals.RayChanged:  # the policy has logged it
        return None
    return None if value is None else json.loads(value).get(replica_id)


def _state(role: Role, context: AutoscalingContext) -> PoolState:
    return PoolState(
        role,
        context.target_num_replicas,
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
        tuple(replica.unique_id for replica in context.running_replicas),
    )


def _report(stats: Mapping[str, float], target_ttft_s: float) -> DoorReport:
    report = DoorReport(**{name: stats.get(name, 0.0) for name in _FIELDS})
    bounds = {
        float(name.removeprefix(IN_TIME)): num for name, num in stats.items() if name.startswith(IN_TIME)
    }
    # The first bound that is not below the target: requests between the two count as in time
    within = min((bound for bound in bounds if bound >= target_ttft_s), default=None)
    return replace(report, num_in_time=report.num_answered if within is None else bounds[within])


class _ScalingGauges:
    """Gauges of the controller's process, through Ray's own exporter."""

    def __init__(self) -> None:
        self._target = metrics.Gauge(
            "epdg_scaling_target_replicas", "Replicas that the pool is to have", ("pool",)
        )
        self._needed = metrics.Gauge(
            "epdg_scaling_needed_workers", "Workers that the pool needs now, not rounded", ("pool",)
        )
        self._changes = metrics.Counter(
            "epdg_scaling_changes",
            "Changes of the target, by direction and cause",
            ("pool", "direction", "cause"),
        )

    def set(self, decision: ScalingDecision) -> None:
        for role, target in decision.targets.items():
            self._target.set(target, {"pool": role.value})
            self._needed.set(decision.needed[role], {"pool": role.value})
        for change in decision.changes:
            direction = "up" if change.after > change.before else "down"
            self._changes.inc(1, {"pool": change.role.value, "direction": direction, "cause": change.cause})
