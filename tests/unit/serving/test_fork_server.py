"""The fork server, in processes of its own. Small scripts stand in for Ray's worker; one test has everything
that the real server imports and Ray's own ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.config.settings import REPOSITORY
from deploy.serving.fork_server import (
    BACKGROUND_NICE,
    IMPORTS,
    MAX_EARLY,
    NotForkable,
    check_forkable,
)
from tests.fakes.slow_params import often

MODEL = REPOSITORY / "deploy" / "demo_model"
# Starts the fork server and requests workers, all at once.
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from deploy.serving import fork_server
folder, script, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
module = [sys.executable, "-m", "deploy.serving.fork_server", str(folder), *sys.argv[4:]]
server = subprocess.Popen(module, stdin=subprocess.PIPE)
python = fork_server.write_client(folder)
while server.poll() is None and not (folder / fork_server.SOCKET_NAME).exists():
    time.sleep(0.01)
ray = {"RAY_RAYLET_PID": "1", "RAY_DRIVER": str(os.getpid())}
environments = [{**os.environ, **ray, **({"LANGUAGE": "x"} if index == 9 else {}), "RAY_INDEX": str(index)}
                for index in range(10 - number, 10)]
clients = [subprocess.Popen([python, script, "1"], env=each, cwd=folder) for each in environments]
assert not any(client.wait() for client in clients)
server.stdin.close()
"""
WORKER = """
import json, os, sys
from pathlib import Path
print(json.dumps({
    "arguments": sys.argv[1:], "index": os.environ["RAY_INDEX"], "folder": os.getcwd(), "is_main": __name__,
    "imported": sorted({"slow", "threaded", "fractions"} & set(sys.modules)),
    "is_forked": "fork_server" in Path(f"/proc/self/cmdline").read_text(),
    "ends_with_driver": os.environ["RAY_RAYLET_PID"] == os.environ["RAY_DRIVER"],
    "leads_group": os.getpgid(0) == os.getpid(), "nice": os.nice(0),
    "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
                   for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")),
}) + "\\n", end="")
"""
IDS = """
import sys
is_forked = "torch" in sys.modules
import json, random, tempfile, uuid
import numpy, ray
from ray._raylet import JobID, TaskID, UniqueID, WorkerID
print(json.dumps({"is_forked": is_forked, "index": "", "ids": [
    UniqueID.from_random().hex(), WorkerID.from_random().hex(), TaskID.for_fake_task(JobID.from_int(1)).hex(),
    random.random(), numpy.random.rand(), uuid.uuid4().hex, tempfile.mktemp(),
]}) + "\\n", end="")
"""


def run(
    folder: Path, *imports: str, text: str = WORKER, script: str = "default_worker.py", number: int = 1
) -> list[dict]:
    """The tenth worker has a variable that the server lacks."""
    (folder / script).write_text(text)
    (folder / "slow.py").write_text("import time; time.sleep(0.5)")
    (folder / "threaded.py").write_text("import threading; threading.Timer(60.0, print).start()")
    if text == WORKER:
        (folder / "ray.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), str(folder / script), str(number), str(MODEL), *imports],
        env={
            "PYTHONPATH": f"{REPOSITORY}:{folder}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,  # ends when the last forked process has closed it
        timeout=300,
        check=True,
    )
    return sorted(map(json.loads, ended.stdout.splitlines()), key=lambda worker: worker["index"])


def test_a_worker_gets_arguments_environment_and_streams_and_no_socket(tmp_path):
    worker, _ = run(tmp_path, "fractions", number=2)
    assert worker == {
        "arguments": ["1"], "index": "8", "folder": str(tmp_path), "is_main": "__main__",
        "imported": ["fractions"], "is_forked": True, "ends_with_driver": True, "leads_group": True,
        "nice": os.nice(0), "sockets": 0,
    }  # fmt: skip


def test_a_worker_with_another_environment_is_not_forked(tmp_path):
    *forked, other = run(tmp_path, "fractions", number=3)
    assert [worker["is_forked"] for worker in (*forked, other)] == [True, True, False]
    assert other["ends_with_driver"]


def test_only_the_first_workers_do_without_the_imports(tmp_path):
    workers = run(tmp_path, "fractions", "slow", number=8)[:-1]
    assert len(workers) == 7 and all(worker["is_forked"] for worker in workers)
    assert sum("slow" in worker["imported"] for worker in workers) >= 7 - MAX_EARLY


def test_other_programs_run_with_the_real_interpreter(tmp_path):
    workers = run(tmp_path, "fractions", script="setup_worker.py", number=2)
    assert [(worker["is_forked"], worker["nice"]) for worker in workers] == [(False, os.nice(0))] * 2
    assert not any(worker["ends_with_driver"] for worker in workers)


@pytest.mark.parametrize("script", often(["agent.py", "log_monitor.py", "dashboard.py"], ["dashboard.py"]))
def test_what_no_start_waits_for_leaves_the_cores_to_the_workers(tmp_path, script):
    agent, _ = run(tmp_path, "fractions", script=script, number=2)
    assert agent["nice"] == min(os.nice(0) + BACKGROUND_NICE, 19) and not agent["is_forked"]


@pytest.mark.parametrize("name", ["ray", "threaded"])
def test_a_server_that_shares_too_much_does_not_fork(tmp_path, name):
    worker, _ = run(tmp_path, "fractions", name, number=2)
    assert not worker["is_forked"]


@pytest.mark.parametrize("name", ["ray", "ray._raylet", "grpc._cython.cygrpc"])
def test_a_process_that_has_imported_ray_is_told_so(name):
    with pytest.raises(NotForkable, match=f"^{name} has been imported"):
        check_forkable({"torch": sys, name: sys}, [])


@pytest.mark.parametrize("file", ["/dev/nvidiactl", "/dev/nvidia0"])
def test_a_process_that_has_asked_for_gpus_does_not_fork(file):
    """torch does not call that an initialisation, but no child could use CUDA."""
    with pytest.raises(NotForkable, match="CUDA's driver"):
        check_forkable({}, ["/dev/null", file])


def test_a_process_that_has_initialised_cuda_does_not_fork(monkeypatch):
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(NotForkable, match="initialised CUDA"):
        check_forkable({}, [])


def test_workers_that_are_forked_at_once_draw_different_ids(tmp_path):
    """Everything that the real server imports, and Ray's own ids: siblings must share no random state."""
    workers = [worker["ids"] for worker in run(tmp_path, *IMPORTS, text=IDS, number=9) if worker["is_forked"]]
    assert len(workers) >= 4
    for ids in zip(*workers, strict=True):
        assert len(set(ids)) == len(workers)
