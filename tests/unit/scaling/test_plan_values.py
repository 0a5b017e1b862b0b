"""The best division of GPUs as values for the chart and as a Serve configuration."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.config.settings import REPOSITORY, ClusterArgs
from deploy.app import Hosts, actor_options_of
from deploy.generate import CHART
from deploy.simulator.__main__ import main
from deploy.simulator.hardware import (
    ACCELERATORS,
    MODELS,
    VL_7B,
    decode_curve,
    num_kv_blocks,
    prefill_curve,
)
from deploy.simulator.layouts import Layout
from deploy.simulator.plan_report import plan_config, plan_values
from deploy.simulator.planner import Plan

EXAMPLES = sorted((REPOSITORY / "deploy").glob("cluster-*-gpus.yaml"))
NOTHING = Hosts(frozenset(), frozenset())


def _plan(*counts: int) -> Plan:
    division = (("h200", Layout(*counts, may_prefill_locally=True)),)
    return Plan(division, rate=12.5, estimate=14.0, summary=None)


def test_a_plan_becomes_values_that_the_chart_has():
    values = yaml.safe_load(plan_values(_plan(0, 5, 0, 3), "promise"))
    assert values["pools"] == {
        "prefill": {"enabled": True, "pods": 5},
        "language": {"enabled": True, "pods": 3},
        "encode": {"enabled": False},
        "decode": {"enabled": False},
    }
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() <= known.keys() and values["pools"].keys() <= known["pools"].keys()
    assert "pods" in known["poolDefaults"]


def test_a_pool_of_the_chart_has_one_kind_of_gpu():
    division = (("h200", Layout(1, 1, 1)), ("a100", Layout(1, 1, 1)))
    with pytest.raises(ValueError, match="one kind"):
        plan_values(Plan(division, 1.0, 1.0, None), "promise")


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 0, 0, 3), (0, 0, 0, 0, 4)])
def test_a_plan_becomes_a_configuration(counts):
    content = yaml.safe_load(plan_config(_plan(*counts), "promise", VL_7B, "command"))["applications"][0]
    args = ClusterArgs.model_validate(content["args"])
    replicas = {each["name"]: each["num_replicas"] for each in content["deployments"]}
    assert list(replicas) == [*(role.deployment for role in args.roles), "Door"]
    assert list(replicas.values()) == [*(count for count in counts if count), 1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_takes_the_gpus_that_its_command_names(path: Path):
    command = re.search(r"python -m deploy.simulator plan (.*)", path.read_text())
    assert command
    ((name, count),) = re.findall(r"--gpus (\w+):(\d+)", command[1])
    content = yaml.safe_load(path.read_text())["applications"][0]
    args = ClusterArgs.model_validate(content["args"])
    replicas = {each["name"]: each["num_replicas"] for each in content["deployments"]}
    gpus = sum(
        replicas[role.deployment] * actor_options_of(role, args, NOTHING)["num_gpus"] for role in args.roles
    )
    assert gpus == int(count) * ACCELERATORS[name].num_devices == int(path.name.split("-")[1])


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_what_its_command_writes(path: Path, tmp_path: Path):
    command = re.search(r"python -m deploy.simulator (plan .*) --config", path.read_text())
    assert command
    written = tmp_path / path.name
    assert main([*command[1].split(), "--config", str(written)]) == 0
    assert yaml.safe_load(written.read_text()) == yaml.safe_load(path.read_text())


def test_there_are_examples_for_two_four_and_eight_gpus():
    assert [path.name.split("-")[1] for path in EXAMPLES] == ["2", "4", "8"]
    dense = {
        name for name, model in MODELS.items() if not model.num_active_parameters and not model.state_bytes
    }
    assert {model for path in EXAMPLES for model in MODELS if model in path.read_text()} == dense


def test_a_model_with_experts_computes_with_some_and_holds_all():
    whole, quad, single = MODELS["vl-235b-a22b"], ACCELERATORS["h200x4"], ACCELERATORS["h200"]
    assert num_kv_blocks(whole, quad) * whole.block_size > 100_000 and num_kv_blocks(whole, single) < 0
    dense = replace(whole, num_active_parameters=0.0)
    assert prefill_curve(whole, quad).per_unit_s < 0.1 * prefill_curve(dense, quad).per_unit_s
    assert decode_curve(whole, quad).fixed_s == decode_curve(dense, quad).fixed_s
