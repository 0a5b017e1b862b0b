"""Nothing of a cluster on one machine can be reached from another machine, and Ray runs nothing for strangers
on this one."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import httpx
import pytest

from bench.ray_access import ray_headers
from deploy.serving.launch import processes_of
from tests.fakes.sockets import listeners_of, unix_paths_of, with_descendants
from tests.serve.test_replicas import HANG_S

JOB = {"entrypoint": "id"}


def port_of(cluster, name: str) -> int:
    """Of one of Ray's processes on this node, as it writes it down once it listens: on a busy machine later
    than the cluster serves."""
    deadline, session = time.monotonic() + 300.0, cluster.folder / "ray" / "session_latest"
    while time.monotonic() < deadline:
        found = {path.name: path.read_text().strip() for path in session.glob(f"{name}_*")}
        for port in found.values():
            if port.isdecimal() and 0 < int(port) < 1 << 16:
                return int(port)
        time.sleep(0.2)
    log = (session / "logs" / "dashboard_agent.log").read_text()[-2000:]
    raise AssertionError(f"Ray wrote no port for {name}: {found}; its agent's log ends:\n{log}")


@pytest.fixture(scope="module")
def dashboard(cluster) -> str:
    """Its URL. It starts after the applications, on a busy machine a good while later."""
    deadline = time.monotonic() + 300.0
    while (url := cluster.dashboard_url()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert url is not None, cluster.log_end()
    return url


@pytest.mark.usefixtures("dashboard")
def test_every_socket_listens_on_loopback(cluster):
    listeners = listeners_of(with_descendants(processes_of(cluster.folder)))
    titles = " ".join(listener.process for listener in listeners)
    expected = ("gcs_server", "raylet", "dashboard", "DashboardAgent", "ServeController", "haproxy")
    assert [name for name in expected if name not in titles] == []
    for pool in ("Encode", "Prefill", "Decode", "Door"):
        assert f"epdg:{pool}" in titles
    assert [str(listener) for listener in listeners if not listener.is_local] == []


def test_every_unix_socket_lies_in_a_private_folder(cluster):
    assert cluster.folder.stat().st_mode & 0o777 == 0o700
    assert (cluster.folder / "s").stat().st_mode & 0o777 == 0o700
    paths = unix_paths_of(with_descendants(processes_of(cluster.folder)))
    assert any(path.name.startswith("admin.sock") for path in paths) and len(paths) >= 6
    assert [str(path) for path in paths if not is_private(path, cluster.folder)] == []


def is_private(path: Path, folder: Path) -> bool:
    """Under the cluster's folder, or in another one that this user alone may enter."""
    return folder in path.parents or any(
        stat.S_IMODE(parent.stat().st_mode) & 0o077 == 0 for parent in path.parents if parent.exists()
    )


@pytest.mark.parametrize("server", ["dashboard", "agent"])
def test_ray_takes_no_job_without_the_token(cluster, dashboard, server):
    if server == "dashboard":
        url = f"{dashboard}/api/jobs/"
    else:
        url = f"http://127.0.0.1:{port_of(cluster, 'dashboard_agent_listen_port')}/api/job_agent/jobs/"
    assert httpx.post(url, json=JOB, timeout=HANG_S).status_code == 401
    wrong = {"Authorization": f"Bearer {'0' * 64}"}
    assert httpx.post(url, json=JOB, headers=wrong, timeout=HANG_S).status_code == 403
    # The route is there: with the token the body is looked at, and this one names no entrypoint.
    answer = httpx.post(url, json={}, headers=ray_headers(cluster.folder), timeout=HANG_S)
    assert answer.status_code in (400, 500) and "entrypoint" in answer.text


def test_the_token_is_for_this_user_only(cluster):
    assert stat.S_IMODE((cluster.folder / "ray_token").stat().st_mode) == 0o600
