"""What the driver does when one of Ray's own processes has ended."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.serving import driver
from deploy.serving.driver import GCS_MIN_LIFE_S, keep_gcs
from deploy.serving.ports import free_port
from deploy.serving.ray_internals import RELEASE, SERVE_NAMESPACE
from deploy.serving.status import PLAIN_START, are_running, read_status


class ScriptedNode:
    """Ray's processes. The GCS lives for these times, one after the other; `is_stopping` is set when the last
    one ends."""

    def __init__(self, lives_s: list[float]):
        self.now = 0.0
        self.num_starts = 0
        self.is_stopping = threading.Event()
        self.has_dashboard = False
        self._lives_s = lives_s

    def wait_for_gcs(self) -> None:
        self.now += self._lives_s.pop(0)
        if not self._lives_s:
            self.is_stopping.set()

    def wait_for_raylet(self) -> None:
        """It has ended."""

    def start_dashboard(self) -> str:
        """It takes until `is_stopping`."""
        self.is_stopping.wait(60)
        self.has_dashboard = True
        return "nowhere"

    def restart_gcs(self) -> None:
        self.num_starts += 1

    def keep(self) -> int:
        """How often the GCS was started again."""
        node: Any = self
        keep_gcs(node, self.is_stopping, lambda: self.now)
        return self.num_starts


def test_a_gcs_that_has_ended_is_started_again_until_the_cluster_stops():
    assert ScriptedNode([3600.0, 60.0, 60.0]).keep() == 2


def test_a_gcs_that_ends_at_once_is_given_up():
    assert ScriptedNode([3600.0, GCS_MIN_LIFE_S / 2, 3600.0]).keep() == 1


def test_without_a_raylet_the_driver_ends_with_the_first_lost_pool_though_the_dashboard_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"http_options: {{host: 127.0.0.1, port: {free_port()}}}\napplications: [{{import_path: a:b}}]\n"
    )
    node = ScriptedNode([])
    monkeypatch.setattr(driver, "start_fast", lambda *_: (node, None))
    monkeypatch.setattr(driver, "follow", lambda *_: None)
    with pytest.raises(SystemExit, match="cannot be replaced"):
        driver.main(config, tmp_path)
    assert not node.has_dashboard
    node.is_stopping.set()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of Ray's command `serve`, which returns when the written status says that all runs."""
    import ray
    from ray import serve
    from ray.serve import scripts

    called: list[list[str]] = []
    states = iter(
        [("DEPLOYING", {}), ("DEPLOYING", {"RUNNING": 1, "STARTING": 1}), ("RUNNING", {"RUNNING": 2})]
    )

    def status() -> SimpleNamespace:
        state, replicas = next(states)
        pool = SimpleNamespace(status="HEALTHY", message="", replica_states=replicas)
        app = SimpleNamespace(status=state, message="", deployments={"Door": pool})
        return SimpleNamespace(applications={"default": app})

    def command(arguments: list[str]) -> None:
        called.append(arguments)
        pause = threading.Event()
        for _ in range(6000):
            if are_running(read_status(tmp_path)):
                return
            pause.wait(0.01)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(scripts, "cli", command)
    return called


def test_with_another_ray_the_driver_is_serve_run(tmp_path, monkeypatch, commands, capsys):
    """One line says why, workers come from Python itself, and the status is written all the same."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.99.0")
    python = sys.executable
    driver.main(tmp_path / "cluster.yaml", tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(PLAIN_START) and "2.99.0" in line and RELEASE in line
    assert commands == [["run", "--address", "auto", str(tmp_path / "cluster.yaml")]]
    assert sys.executable == python and not (tmp_path / "python").exists()
    assert read_status(tmp_path)["default"]["deployments"]["Door"] == {
        "status": "HEALTHY", "message": "", "target_num_replicas": 2, "replicas": [{"state": "RUNNING"}] * 2,
    }  # fmt: skip


def test_a_node_that_starts_otherwise_leaves_python_alone(tmp_path, monkeypatch, commands, capsys):
    from ray._private.node import Node

    monkeypatch.delattr(Node, "start_raylet")
    monkeypatch.setattr(sys, "executable", sys.executable)
    python = sys.executable
    driver.main(tmp_path / "cluster.yaml", tmp_path)
    assert "start_raylet" in capsys.readouterr().err
    assert sys.executable == python and len(commands) == 1


def test_a_deployment_by_other_names_is_that_of_serve_run(tmp_path, monkeypatch, commands, capsys):
    """On the Ray that runs already, with the forked workers and the GCS that is kept."""
    import ray
    from ray._private import worker

    gcs = threading.Event()
    node = SimpleNamespace(
        all_processes={"gcs_server": [SimpleNamespace(process=SimpleNamespace(wait=gcs.wait))]}
    )
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(worker, "_global_node", node)
    monkeypatch.delattr("ray.serve.context._set_global_client")
    monkeypatch.setattr(sys, "executable", sys.executable)
    (tmp_path / "cluster.yaml").write_text("applications: []")
    driver.main(tmp_path / "cluster.yaml", tmp_path)
    gcs.set()
    assert "_set_global_client" in capsys.readouterr().err
    assert len(commands) == 1 and sys.executable == str(tmp_path / "python")


def test_the_namespace_is_serves():
    from ray.serve._private.constants import SERVE_NAMESPACE as SERVES

    assert SERVE_NAMESPACE == SERVES
