"""What the driver does when one of Ray's own processes has ended."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from cluster.serving.driver import (
    AGENT_PORT_NAMES,
    GCS_MIN_LIFE_S,
    SERVE_NAMESPACE,
    give_agents_ports,
    keep_gcs,
    wait_for_raylet,
)
from cluster.serving.ports import free_port


class ScriptedNode:
    """Ray's node object, whose GCS lives for these times, one after the other; `is_stopping` is set when the
    last one ends."""

    def __init__(self, lives_s: list[float]):
        self.now = 0.0
        self.num_starts = 0
        self.is_stopping = threading.Event()
        self._lives_s = lives_s
        self.all_processes = {"gcs_server": [SimpleNamespace(process=SimpleNamespace(wait=self._live))]}

    def kill_gcs_server(self, check_alive: bool) -> None:
        assert not check_alive, "it has ended already"

    def start_gcs_server(self) -> None:
        self.num_starts += 1

    def keep(self) -> int:
        """How often the GCS was started again."""
        keep_gcs(self, self.is_stopping, lambda: self.now)
        return self.num_starts

    def _live(self) -> None:
        self.now += self._lives_s.pop(0)
        if not self._lives_s:
            self.is_stopping.set()


def test_a_gcs_that_has_ended_is_started_again_until_the_cluster_stops():
    assert ScriptedNode([3600.0, 60.0, 60.0]).keep() == 2


def test_a_gcs_that_ends_at_once_is_given_up():
    assert ScriptedNode([3600.0, GCS_MIN_LIFE_S / 2, 3600.0]).keep() == 1


def test_without_a_raylet_the_driver_ends_with_the_first_lost_pool(tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(f"http_options: {{host: 127.0.0.1, port: {free_port()}}}\napplications: []\n")
    raylet = SimpleNamespace(process=SimpleNamespace(wait=lambda: 0))
    with pytest.raises(SystemExit, match="cannot be replaced"):
        wait_for_raylet(SimpleNamespace(all_processes={"raylet": [raylet]}), config)


def test_the_raylet_finds_the_ports_of_agents_that_have_not_started(tmp_path):
    """In the files for which it waits, under Ray's names, and in the parameters of the agents' start."""
    raylet = pytest.importorskip("ray._raylet")
    node = SimpleNamespace(
        _ray_params=SimpleNamespace(), get_session_dir_path=lambda: str(tmp_path), node_id="ab" * 28
    )
    give_agents_ports(node)
    wanted = {
        raylet.METRICS_AGENT_PORT_NAME, raylet.METRICS_EXPORT_PORT_NAME,
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME, raylet.RUNTIME_ENV_AGENT_PORT_NAME,
    }  # fmt: skip
    assert wanted == set(AGENT_PORT_NAMES) == node._ray_params.__dict__.keys()
    for name, port in node._ray_params.__dict__.items():
        assert raylet.wait_for_persisted_port(str(tmp_path), node.node_id, name, timeout_ms=0) == port


def test_the_namespace_is_serves():
    from ray.serve._private.constants import SERVE_NAMESPACE as SERVES

    assert SERVE_NAMESPACE == SERVES
