"""The fork server, in processes of its own, with small scripts in place of Ray's worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cluster.config.settings import REPOSITORY
from cluster.serving import fork_server

# Starts the fork server and requests workers one after the other.
DRIVER = """
import os, subprocess, sys
from pathlib import Path
from cluster.serving import fork_server
folder, script, imports, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
sys.path.insert(0, str(folder))
python = fork_server.start(folder, [imports] if imports else [])
for index in range(number):
    environment = {**os.environ, "INDEX": str(index)}
    subprocess.run([python, script, str(index)], env=environment, cwd=folder, check=True)
"""
WORKER = """
import json, os, sys
from pathlib import Path
print(json.dumps({
    "index": sys.argv[1], "environment": os.environ["INDEX"], "folder": os.getcwd(), "is_main": __name__,
    "imported": sorted({"slow", "threaded", "fractions"} & set(sys.modules)), "parent": os.getppid(),
    "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
                   for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")),
}))
"""


def run(
    folder: Path, script: str, *, imports: str = "fractions", number: int = 1, job: str = fork_server.JOB_ID
) -> list[dict]:
    (folder / script).write_text(WORKER)
    (folder / "slow.py").write_text("import time; time.sleep(0.3)")
    (folder / "threaded.py").write_text("import threading; threading.Timer(60.0, print).start()")
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), str(folder / script), imports, str(number)],
        env={"RAY_JOB_ID": job, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,  # ends when the last forked process has closed it
        timeout=60,
        check=True,
    )
    return sorted(map(json.loads, ended.stdout.splitlines()), key=lambda worker: worker["index"])


def test_a_worker_gets_arguments_environment_and_streams_and_no_socket(tmp_path):
    (worker,) = run(tmp_path, "default_worker.py")
    assert worker["sockets"] == 0
    assert worker["index"] == worker["environment"] == "0"
    assert worker["folder"] == str(tmp_path) and worker["is_main"] == "__main__"


def test_only_the_first_workers_do_without_the_imports(tmp_path):
    workers = run(tmp_path, "default_worker.py", imports="slow", number=5)
    assert len(workers) == 5
    assert all("slow" in worker["imported"] for worker in workers[3:])


def test_other_programs_run_with_the_real_interpreter(tmp_path):
    (program,) = run(tmp_path, "agent.py")
    assert program["imported"] == []


def test_without_a_server_the_real_interpreter_runs_the_worker(tmp_path):
    (worker,) = run(tmp_path, "default_worker.py", imports="missing", number=4)[3:]
    assert worker["imported"] == []


def test_a_server_with_a_second_thread_does_not_fork(tmp_path):
    (worker,) = run(tmp_path, "default_worker.py", imports="threaded", number=4)[3:]
    assert worker["imported"] == []


def test_a_worker_of_another_job_is_run_by_the_real_interpreter(tmp_path):
    (worker,) = run(tmp_path, "default_worker.py", job="02000000", number=4)[3:]
    assert worker["imported"] == []
