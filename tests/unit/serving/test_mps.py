"""The daemon that lets workers share a GPU, with a script in its place."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from deploy.serving.mps import DAEMON, shares_gpus, start_mps

OPENS = (sys.executable, "-c", "import os; assert os.environ['CUDA_MPS_PIPE_DIRECTORY']")
FAILS = (sys.executable, "-c", "raise SystemExit(3)")
STAYS, ENDS = "#!/bin/sh\nexec sleep 60\n", "#!/bin/sh\nexit 1\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{tmp_path}/bin:{os.defpath}", "RAY_TMPDIR": str(tmp_path)}


def install(tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / DAEMON).write_text(script)
    (tmp_path / "bin" / DAEMON).chmod(0o755)


def test_clients_are_told_of_a_daemon_through_which_the_gpu_opens(tmp_path, environment):
    install(tmp_path, STAYS)
    said: list[str] = []
    daemon, found_by = start_mps(tmp_path, environment, said.append, OPENS)
    assert daemon is not None and daemon.poll() is None and said == []
    daemon.kill()
    daemon.wait()
    assert set(found_by.values()) == {str(tmp_path / "mps")}
    assert stat.S_IMODE((tmp_path / "mps").stat().st_mode) == 0o700, "others could use this user's GPU"


@pytest.mark.parametrize(("script", "probe"), [(STAYS, FAILS), (ENDS, FAILS)])
def test_where_the_gpu_does_not_open_the_daemon_is_ended_and_that_is_said(
    tmp_path, environment, script, probe
):
    install(tmp_path, script)
    said: list[str] = []
    assert start_mps(tmp_path, environment, said.append, probe) == (None, {})
    assert "error 3" in said[0]


def test_without_the_program_workers_take_turns_and_that_is_said(tmp_path, environment):
    said: list[str] = []
    assert start_mps(tmp_path, environment, said.append) == (None, {})
    assert "not installed" in said[0] and not (tmp_path / "mps").exists()


@pytest.mark.parametrize(("shares", "expected"), [((0.2, 0.8), True), ((1, 1), False), ((0,), False)])
def test_workers_with_parts_of_a_gpu_share_it(shares, expected):
    deployments = [{"name": "Encode", "ray_actor_options": {"num_gpus": share}} for share in shares]
    assert shares_gpus({"applications": [{"deployments": [*deployments, {"name": "Door"}]}]}) is expected
