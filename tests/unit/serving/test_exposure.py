"""What a cluster lets other machines reach."""

from __future__ import annotations

import stat
import subprocess

import pytest
from ray.serve._private import haproxy_templates

from cluster.config.environment import read_environment
from cluster.config.settings import REPOSITORY
from cluster.errors import ConfigError
from deploy.serving import exposure, local_environment


@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "Disabled"}])
def test_a_ray_that_anything_can_command_is_refused_on_a_network(variables):
    environment = read_environment(variables)
    with pytest.raises(ConfigError, match="without authentication"):
        exposure.require_authentication("10.0.0.7", environment)
    exposure.require_authentication("127.0.0.1", environment)


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
def test_a_ray_with_a_token_may_be_on_a_network(host):
    environment = read_environment({"RAY_AUTH_MODE": "token"})
    exposure.require_authentication(host, environment)
    assert environment.is_ray_authenticated


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [("127.0.0.1", "127.0.0.1:0"), ("10.0.0.7", "10.0.0.7:0"), ("fd00::7", "[fd00::7]:0")],
)
def test_the_grpc_server_of_a_replica_is_bound_to_its_nodes_address(monkeypatch, host, endpoint):
    from ray.serve._private import replica

    bound = []
    monkeypatch.setattr(replica, "add_port_to_grpc_server", lambda server, address: bound.append(address))
    monkeypatch.setattr(exposure.ray.util, "get_node_ip_address", lambda: host)
    exposure.bind_to_node_address()
    replica.add_port_to_grpc_server(None, "[::]:0")
    assert bound == [endpoint]


@pytest.mark.parametrize("host", ["127.0.0.1", "*"])
def test_haproxys_own_pages_stay_on_loopback(tmp_path, monkeypatch, host):
    """The frontend of the API listens where the configuration says."""
    config = tmp_path / "haproxy.cfg"
    template = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    for name, value in {
        "frontend_host": host,
        "frontend_port": 8000,
        "metrics_port": 1,
        "stats_port": 2,
    }.items():
        template = template.replace(f"{{{{ config.{name} }}}}", str(value))
    config.write_text(template)
    environment = local_environment.cluster_environment(tmp_path)
    environment["HAPROXY_BINARY"] = "/bin/echo"
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-sf", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == command[1:]
    binds = [line.split()[1] for line in config.read_text().splitlines() if line.split()[:1] == ["bind"]]
    assert binds[:2] + binds[-1:] == ["127.0.0.1:1", f"{host}:8000", "127.0.0.1:2"]


def test_what_the_environment_names_is_for_this_user_only(tmp_path):
    environment = local_environment.cluster_environment(tmp_path)
    assert environment["RAY_AUTH_MODE"] == "token" and not environment["RAY_AUTH_TOKEN"]
    assert stat.S_IMODE((tmp_path / "ray_token").stat().st_mode) == 0o600
    token = (tmp_path / "ray_token").read_text()
    assert len(token) == 64
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray_token")
    for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_FILE", "LOG_TARGET"):
        assert environment[f"RAY_SERVE_HAPROXY_{name}"].startswith(f"{tmp_path}/proxy/")


def test_packages_that_the_user_has_in_pythonpath_are_found_in_the_cluster_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/opt/wheels")
    environment = local_environment.cluster_environment(tmp_path)
    assert environment["PYTHONPATH"] == f"{REPOSITORY}:/opt/wheels"
    monkeypatch.delenv("PYTHONPATH")
    assert local_environment.cluster_environment(tmp_path)["PYTHONPATH"] == str(REPOSITORY)
