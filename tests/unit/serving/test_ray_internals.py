"""What happens when Ray is of another release, or a private name of it is gone."""

from __future__ import annotations

import re
import tomllib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray._private.node import Node
from ray.serve._private import replica

from cluster.config.settings import REPOSITORY
from cluster.errors import ConfigError
from deploy.serving import ray_internals
from deploy.serving.door import take_freed_port
from deploy.serving.exposure import bind_to_node_address
from deploy.serving.ray_internals import RELEASE, RayChanged

NODE_METHODS = ("start_api_server", "start_monitor", "start_raylet")


def methods() -> list[object]:
    return [getattr(Node, name) for name in NODE_METHODS]


def test_the_release_is_the_one_that_the_package_asks_for():
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = [each for each in needed if each.startswith("ray[serve]")]
    lower, upper = re.findall(r"[\d.]+", bounds)
    major, minor = RELEASE.split(".")
    assert (lower, upper) == (RELEASE, f"{major}.{int(minor) + 1}")
    ray_internals.check_release()


@pytest.mark.parametrize("version", ["2.61.0", "3.0.0", "2.6.0", "2.600.0"])
def test_another_release_starts_nothing(monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(RayChanged, match=f"{version}.*{RELEASE}"):
        ray_internals.start_ray([1, 2, 3, 4])


@pytest.mark.parametrize(
    "path",
    [
        *(
            f"ray._private.node.Node.{name}"
            for name in (*NODE_METHODS, "start_gcs_server", "kill_gcs_server")
        ),
        "ray._raylet.persist_port",
    ],
)
def test_a_missing_name_starts_nothing(monkeypatch, path):
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray is started"))
    monkeypatch.delattr(path)
    before = dict(vars(Node))
    with pytest.raises(RayChanged, match=path.rpartition(".")[2]):
        ray_internals.start_ray([1, 2, 3, 4])
    assert dict(vars(Node)) == before


def test_the_node_has_its_methods_again_after_a_start_that_failed(monkeypatch):
    def fail(**options: object) -> None:
        assert not set(methods()) & set(own), "they are not replaced"
        raise OSError("no room")

    own = methods()
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(OSError, match="no room"):
        ray_internals.start_ray([1, 2, 3, 4])
    assert methods() == own


@pytest.mark.parametrize(
    "name",
    [
        "ray.serve._private.api._create_controller_and_proxy_refs",
        "ray.serve._private.client.ServeControllerClient.deploy_apps",
        "ray.serve._private.client.ServeControllerClient.get_serve_details",
        "ray.serve.context._set_global_client",
    ],
)
def test_a_missing_name_deploys_nothing(monkeypatch, name):
    monkeypatch.delattr(name)
    with pytest.raises(RayChanged, match=name.rpartition(".")[2]):
        ray_internals.deploy({"applications": []})


def test_the_raylet_finds_the_ports_of_agents_that_have_not_started(tmp_path, monkeypatch):
    """In the files for which it waits, under Ray's names, and in the parameters of the agents' start."""
    import ray._raylet

    raylet: Any = ray._raylet
    node: Any = SimpleNamespace(
        _ray_params=SimpleNamespace(), get_session_dir_path=lambda: str(tmp_path), node_id="ab" * 28
    )
    started = []
    monkeypatch.setattr(Node, "start_raylet", lambda node, *memory: started.append(memory))
    monkeypatch.setattr(ray, "init", lambda **options: cast(Any, Node).start_raylet(node, 1, 2))
    ports = [28_001, 28_002, 28_003, 28_004]
    ray_internals.start_ray(ports)
    assert started == [(1, 2)]
    wanted = {
        raylet.METRICS_AGENT_PORT_NAME, raylet.METRICS_EXPORT_PORT_NAME,
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME, raylet.RUNTIME_ENV_AGENT_PORT_NAME,
    }  # fmt: skip
    assert wanted == set(ray_internals.AGENT_PORT_NAMES) == node._ray_params.__dict__.keys()
    assert sorted(node._ray_params.__dict__.values()) == ports
    for name, port in node._ray_params.__dict__.items():
        assert raylet.wait_for_persisted_port(str(tmp_path), node.node_id, name, timeout_ms=0) == port


def test_a_replica_that_would_listen_everywhere_does_not_start(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.delattr(replica, "add_port_to_grpc_server")
    with pytest.raises(ConfigError, match=r"every interface.*add_port_to_grpc_server"):
        bind_to_node_address()


def test_a_door_without_reuse_of_ports_starts_and_says_so(monkeypatch, caplog):
    monkeypatch.delattr(replica, "start_asgi_http_server")
    take_freed_port()
    assert "start_asgi_http_server" in caplog.text
