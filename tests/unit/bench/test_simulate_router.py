"""The router's experiments: cases, records, tables, the plan, admission in front of simulated doors."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from bench.records import Record
from bench.router import report, run
from bench.router.__main__ import main, make_parser
from bench.router.cases import (
    POLICY_NAMES,
    SCENARIOS,
    SPLITS,
    GroupCase,
    OverloadCase,
    PolicyCase,
    SplitCase,
    all_cases,
    names,
)
from bench.router.decisions import decisions, loaded_cluster, table
from bench.router.policies import ORACLE, maker
from bench.router.run import promised, record
from bench.router.scale import scale
from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from cluster.errors import ConfigError
from deploy.simulator import __main__ as simulate_main
from deploy.simulator.demand import capacity, demand
from deploy.simulator.hardware import A100, H200, VL_7B
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.plan_report import plan_plot, plan_table
from deploy.simulator.planner import divisions, neighbours, plan
from deploy.simulator.results import Slo
from deploy.simulator.search import run_once
from deploy.simulator.simulation import SCHEDULING, Simulation
from deploy.simulator.workload import WORKLOADS, Workload, fixed_text, image_prompts
from tests.fakes.slow_params import often

TIMES = {"ttft_mean_s": 0.1, "ttft_p50_s": 0.08, "ttft_p99_s": 0.5, "second_mean_s": 0.12}


def a_policy_record(policy: str, seed: int, ttft_s: float) -> Record:
    rest = {"cached_share": 0.5, "mape": 0.04, "coverage": 0.9, "commit": "c", "date": "d"}
    name = {"type": "policies", "scenario": "text", "policy": policy, "seed": seed}
    return TIMES | rest | name | {"ttft_mean_s": ttft_s}


# --- cases


def test_every_case_is_told_from_the_others_by_its_record() -> None:
    cases = all_cases(num_seeds=2)
    keys = {json.dumps(names(case) | {"seed": case.seed}) for case in cases}
    assert len(keys) == len(cases)
    assert {case.seed for case in all_cases(num_seeds=2, first_seed=500)} == {500, 501}


def test_cases_name_scenarios_workloads_and_policies_that_exist() -> None:
    for case in all_cases(num_seeds=1):
        if isinstance(case, PolicyCase):
            assert SCENARIOS[case.scenario].workload in WORKLOADS
            assert callable(maker(case.policy))
        elif isinstance(case, SplitCase):
            assert case.workload in WORKLOADS and SPLITS[case.split].layout.num_devices == 4


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(ConfigError):
        maker("guess")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_is_busy_and_not_overloaded(scenario: str) -> None:
    found = SCENARIOS[scenario]
    load = found.rate / capacity(found.specs(), demand(WORKLOADS[found.workload]))
    has_reuse = found.workload in ("multi-turn", "grouped")
    assert 0.5 < load < (3 if has_reuse else 0.95)


@pytest.mark.parametrize(
    "case",
    [
        PolicyCase("4 images", "joint", 0, 40),
        PolicyCase("two kinds of GPU", ORACLE, 0, 40),
        pytest.param(
            SplitCase("text", "4 EPD, joint", "1 s, 25 ms", 0, min_requests=20), marks=pytest.mark.slow
        ),
        GroupCase("joint", "1 E, 3 P, 4 D, joint", 20.0, 0, 40),
        OverloadCase(1.0, True, 0, 0.5),
    ],
)
def test_a_record_follows_from_its_case(
    case: PolicyCase | SplitCase | GroupCase | OverloadCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ARRIVALS", 3)  # of each step of a search
    first, again = record(case), record(case)
    assert {k: v for k, v in first.items() if k != "cpu_s"} == {
        k: v for k, v in again.items() if k != "cpu_s"
    }
    assert first.items() >= names(case).items()
    json.dumps(first)


def test_in_a_split_a_step_with_prompts_lasts_no_longer_than_a_token_may_take() -> None:
    specs = workers(Layout(num_whole=4), VL_7B, A100)
    decode = specs[0].curves.decode
    assert decode is not None
    expected = replace(SCHEDULING, prompt_pause_s=0.025 - decode.fixed_s)
    assert promised(Slo(1.0, 0.025), specs) == expected
    assert promised(Slo(2.0, 0.1), specs) == promised(Slo(2.0), specs) == SCHEDULING


@pytest.mark.slow
def test_more_answers_are_in_time_with_the_setting_of_their_limit() -> None:
    slo, specs = Slo(1.0, 0.025, share=0.9), workers(Layout(num_whole=4), VL_7B, A100)
    good_shares = [
        run_once(
            specs, maker("joint"), VL_7B, WORKLOADS["1-image"], 22.0, 300, 100, slo, scheduling
        ).good_share
        for scheduling in (SCHEDULING, promised(slo, specs))
    ]
    assert good_shares[0] < 0.9 < good_shares[1]


# --- tables


def test_regret_is_taken_within_a_seed() -> None:
    records = [a_policy_record("joint", seed, ttft_s) for seed, ttft_s in ((0, 0.11), (1, 0.22))]
    records += [a_policy_record(ORACLE, seed, ttft_s) for seed, ttft_s in ((0, 0.1), (1, 0.2))]
    line = next(line for line in report.policy_table(records) if "| joint |" in line)
    assert "+10.0 ± 0.0 %" in line
    overall = next(line for line in report.overall_table(records) if line.startswith("| joint"))
    assert "| 1.100 | text | 1.10 | 4.0% | 90.0% |" in overall


def test_any_role_is_compared_with_the_best_of_the_others() -> None:
    records = [
        {
            "type": "splits",
            "workload": "4-image",
            "slo": "1 s, 25 ms",
            "split": split,
            "seed": seed,
            "rate": rate,
            "most": 7.0,
        }
        for split, rate in (
            ("4 EPD, each request on one", 3.0),
            ("1 E, 2 P, 1 D", 4.0),
            ("4 EPD, joint", 6.0),
        )
        for seed in (0, 1)
    ]
    line = report.split_table(records)[-1]
    assert "1.50 ± 0.00 (1 E, 2 P, 1 D)" in line


def test_overload_is_measured_against_the_peak_of_its_own_kind() -> None:
    records = [
        {
            "type": "overload", "admission": has_admission, "load": load, "seed": 0, "rate": 10.0, "good_work": good,
            "num_refused": 5, "num_requests": 20, "ttft_p99_s": 1.0, "longest_wait_s": {"interactive": 1.5},
        }
        for has_admission, load, good in ((True, 1.0, 100.0), (True, 3.0, 95.0), (False, 1.0, 100.0), (False, 3.0, 20.0))
    ]  # fmt: skip
    lines = report.overload_table(records)
    assert "| 95% | 25% |" in next(line for line in lines if line.startswith("| 1E+4P+2D | yes | 3"))
    assert "| 20% | 25% |" in next(line for line in lines if line.startswith("| 1E+4P+2D | no | 3"))


def test_the_report_is_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "r.jsonl"
    results.write_text(
        "\n".join(json.dumps(a_policy_record(policy, 0, 0.1)) for policy in POLICY_NAMES) + "\n"
    )
    assert main(["report", str(results)]) == 0
    assert "**policies** (1 seeds; commit c, d)" in capsys.readouterr().out


def test_the_commands_have_the_documented_arguments() -> None:
    args = make_parser().parse_args(["simulate", "--out", "r.jsonl", "--only", "groups", "--seeds", "2"])
    assert (args.only, args.seeds, args.first_seed) == (["groups"], 2, 0)


# --- planning


def test_arithmetic_finds_the_narrowest_phase() -> None:
    wanted = demand(Workload("images", image_prompts(4, 400)))
    assert wanted.num_rows == 1600 and wanted.num_tokens == 2016
    balanced, starved = (
        capacity(workers(layout, VL_7B, H200), wanted) for layout in (Layout(2, 5, 1), Layout(1, 6, 1))
    )
    assert starved < 0.6 * balanced
    assert capacity(workers(Layout(0, 6, 2), VL_7B, H200), wanted) == 0


def test_devices_that_do_everything_serve_what_their_time_allows() -> None:
    wanted = demand(Workload("text", fixed_text(1000, 50)))
    one, four = (capacity(workers(Layout(num_whole=n), VL_7B, H200), wanted) for n in (1, 4))
    assert four == pytest.approx(4 * one)
    assert one < capacity(workers(Layout(0, 1, 1), VL_7B, H200), wanted)


def test_every_division_of_the_devices_is_considered_once() -> None:
    found = list(divisions({"h200": 3, "a100": 1}))
    assert len(found) == len(set(found)) == 35 * 5  # three devices and one, each with one of five roles
    assert all(sum(layout.num_devices for _, layout in each) == 4 for each in found)
    assert set(neighbours(found[4])) <= set(found)


@pytest.mark.parametrize(("tpot_s", "num_decode"), often([(math.inf, 0), (0.009, 1)], [(0.009, 1)]))
def test_a_limit_for_each_token_decides_whether_decode_has_devices_of_its_own(
    tpot_s: float, num_decode: int
) -> None:
    workload = Workload("long texts", fixed_text(4000, 10))
    plans = plan(workload, Slo(2.0, tpot_s), {"h200": 2}, VL_7B, 10)
    best = plans[0].division[0][1]
    assert best.num_decode == num_decode
    assert plans[0].rate >= 0.97 * max(each.rate for each in plans) > 0
    assert best.name in plan_table(plans)[2]
    assert ElementTree.fromstring(plan_plot(plans, workload.name)).tag.endswith("svg")


def test_devices_without_room_for_the_model_are_an_error() -> None:
    with pytest.raises(ValueError, match="room for the model"):
        plan(WORKLOADS["1-image"], Slo(2.0), {"h200": 2}, replace(VL_7B, num_parameters=80e9), 50)


@pytest.mark.slow
def test_the_planner_command_writes_a_table_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--workload", "text-400", "--gpus", "h200:2", "--requests", "10"]
    assert simulate_main.main([*command, "--svg", str(tmp_path / "p.svg")]) == 0
    assert "1P+1D*" in capsys.readouterr().out
    assert (tmp_path / "p.svg").exists()
    assert simulate_main.main(["plan", "--workload", "1-image", "--gpus", "h200:0"]) == 1


def test_a_layout_on_the_command_line_is_six_counts_at_most() -> None:
    parser = simulate_main.make_parser()
    command = ["run", "--workload", "1-image", "--rate", "1", "--layout"]
    assert parser.parse_args([*command, "1,4,3"]).layout == Layout(1, 4, 3)
    assert parser.parse_args([*command, "1,0,0,2,0,3"]).layout == Layout(1, 0, 0, 2, 0, 3)
    with pytest.raises(SystemExit):
        parser.parse_args([*command, "1,4,3,0,0,0,2"])


# --- overload


def test_admission_refuses_what_cannot_be_served_and_leaves_nothing_behind() -> None:
    specs = workers(Layout(1, 1, 1), VL_7B, H200)
    workload = replace(WORKLOADS["tenants"], name="overload")
    rate = 4 * capacity(specs, demand(workload))
    classes = (
        AdmissionClassArgs(name="interactive", max_priority=0, max_wait_s=1.0),
        AdmissionClassArgs(name="batch", max_wait_s=4.0),
    )
    simulation = Simulation(specs, [maker("joint")], VL_7B, admission=AdmissionArgs(classes=classes))
    outcomes = simulation.run(workload.requests(rate, 300, 0))
    assert len({outcome.request.request_id for outcome in outcomes}) == len(outcomes) == 300
    assert {outcome.status for outcome in outcomes} == {"finished", "refused"}
    assert all(o.waited_s <= (4.0 if o.request.priority else 1.0) + 1e-6 for o in outcomes)
    assert simulation.doors[0].is_idle


@pytest.mark.slow
def test_a_large_cluster_serves_every_request() -> None:
    found = scale(60, 300, "least_loaded", media=True)
    assert found["num_ended"] == 300
    assert found["layout"] == "12E+36P+12D"


def test_slower_accelerators_serve_less() -> None:
    wanted = demand(WORKLOADS["4-image"])
    assert capacity(workers(Layout(1, 2, 1), VL_7B, A100), wanted) < 0.5 * capacity(
        workers(Layout(1, 2, 1), VL_7B, H200), wanted
    )


def test_a_decision_is_measured_for_each_kind_of_request_over_pools_of_the_size_asked_for():
    found = decisions(num_workers=6, num_decisions=14)
    assert [(each["workers_per_pool"], each["images"]) for each in found] == [(6, 0), (6, 1), (6, 2), (6, 4)]
    assert all(each["loss"] >= 0 for each in found)
    assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in found)
    cluster = loaded_cluster(6, random.Random(1))
    assert [len(pool) for pool in (cluster.encoders, cluster.prefills, cluster.decodes)] == [6, 12, 6]
    assert cluster.prefills.reported_units.max() > 0
    assert len(table(found)) == 6
