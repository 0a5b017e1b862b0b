"""The scaling policy as Ray Serve's controller calls it: contexts of deployments in, numbers of replicas
out."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

from deploy.generate import CHART
from deploy.serving.scaling import ScalingPolicy, assigned_phases, door_stats
from router.scaling import DoorReport, ScalingSettings


class ReplicaId(NamedTuple):
    unique_id: str


class Contexts:
    """What Serve knows; deployments are named by strings."""

    def __init__(self, **replicas: int):
        self.target = dict(replicas)
        self.stats: dict[str, dict[str, float]] = {}  # of each door

    def now(self) -> dict[Any, Any]:
        return {
            name: SimpleNamespace(
                deployment_name=name,
                app_name="epdg",
                target_num_replicas=target,
                capacity_adjusted_min_replicas=1,
                capacity_adjusted_max_replicas=4,
                running_replicas=[ReplicaId(f"{name}{i}") for i in range(target)],
                raw_metrics=self._raw() if name == "Door" else {},
            )
            for name, target in self.target.items()
        }

    def _raw(self) -> dict[str, dict[Any, list[Any]]]:
        raw: dict[str, dict[Any, list[Any]]] = {}
        for door, stats in self.stats.items():
            for name, value in stats.items():
                series = [SimpleNamespace(value=-1.0), SimpleNamespace(value=value)]
                raw.setdefault(name, {})[ReplicaId(door)] = series
        return raw


def make_policy() -> ScalingPolicy:
    return ScalingPolicy(period_s=0.0, target_ttft_s=2.0)


def test_what_doors_report_becomes_the_number_of_replicas():
    contexts, policy = Contexts(Prefill=1, Decode=1, Door=2), make_policy()
    report = DoorReport(num_requests=1, waiting_prefill_s=25.0, used_blocks_ratio=1.4)
    contexts.stats = {door: door_stats(report, {2.5: 0.0}) for door in ("first", "second")}
    targets, state = policy(contexts.now())
    assert targets == {"Prefill": 4, "Decode": 2} and state is None


def test_no_door_that_reports_changes_nothing():
    contexts, policy = Contexts(Prefill=3, Door=1), make_policy()
    assert policy(contexts.now()) == ({}, None)
    del contexts.target["Door"]
    assert policy(contexts.now()) == ({}, None)


def test_an_error_stays_inside_the_policy():
    contexts, policy = Contexts(Prefill=1, Door=1), make_policy()
    contexts.stats = {"door": {"num_requests": 1.0, "waiting_prefill_s": None}}  # type: ignore[dict-item]
    assert policy(contexts.now()) == ({}, None)


def test_first_tokens_in_time_are_counted_by_the_buckets_of_the_door():
    from deploy.serving.scaling import _report

    stats = door_stats(DoorReport(num_answered=10), {1.0: 3.0, 2.5: 8.0, float("inf"): 10.0})
    assert _report(stats, 2.0).num_in_time == 8.0
    assert _report(stats, 60.0).num_in_time == 10.0


def test_the_shipped_file_gives_settings_that_exist():
    (application,) = yaml.safe_load((CHART.parent / "cluster-scaled.yaml").read_text())["applications"]
    policy = application["autoscaling_policy"]
    assert policy["policy_function"] == "deploy.serving.scaling:ScalingPolicy"
    ScalingSettings(**policy["policy_kwargs"])
    assert all("autoscaling_config" in each for each in application["deployments"])


def test_without_rays_store_workers_do_all_phases_and_one_warning_says_so(monkeypatch):
    monkeypatch.delattr("ray.experimental.internal_kv._internal_kv_put")
    monkeypatch.delattr("ray.experimental.internal_kv._internal_kv_get")
    warnings: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: warnings.append(record.getMessage()))
    logging.getLogger("ray.serve").addHandler(handler)
    contexts, policy = Contexts(Language=2, Door=1), make_policy()
    contexts.stats = {"door": door_stats(DoorReport(), {2.5: 0.0})}
    try:
        for _ in range(2):
            targets, _ = policy(contexts.now())
            assert "Language" in targets
    finally:
        logging.getLogger("ray.serve").removeHandler(handler)
    (warning,) = [each for each in warnings if "all phases of its role" in each]
    assert "_internal_kv_put" in warning
    assert assigned_phases("epdg", "Language0") is None
