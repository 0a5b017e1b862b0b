"""The best division of GPUs as values for the chart."""

from __future__ import annotations

import pytest
import yaml

from cluster.simulator.layouts import Layout
from cluster.simulator.plan_report import plan_values
from cluster.simulator.planner import Plan
from deploy.generate import CHART


def test_a_plan_becomes_values_that_the_chart_has():
    plan = Plan(
        (("h200", Layout(0, 5, 3, may_prefill_locally=True)),), rate=12.5, estimate=14.0, summary=None
    )
    values = yaml.safe_load(plan_values(plan, "promise"))
    assert values["pools"] == {"encode": {"enabled": False}, "prefill": {"pods": 5}, "decode": {"pods": 3}}
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() <= known.keys() and values["pools"].keys() <= known["pools"].keys()
    assert "pods" in known["poolDefaults"]


def test_a_pool_of_the_chart_has_one_kind_of_gpu():
    division = (("h200", Layout(1, 1, 1)), ("a100", Layout(1, 1, 1)))
    with pytest.raises(ValueError, match="one kind"):
        plan_values(Plan(division, 1.0, 1.0, None), "promise")
