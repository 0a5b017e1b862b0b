"""What the script that stands in for HAProxy makes of the configuration that Ray has written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.serving.local_environment import HAPROXY_SCRIPT

DEFAULTS = """defaults
    option abortonclose
    option splice-request
"""
CONFIG = """frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
    {route}
backend default_backend
    http-request return status 404
backend http-epdg
    http-reuse always
listen stats
  bind *:8404
"""
ROUTE = "use_backend http-epdg if is_http-epdg"


@pytest.fixture
def changed(tmp_path: Path):
    def change(route: str) -> str:
        config, script = tmp_path / "haproxy.cfg", tmp_path / "haproxy"
        config.write_text(DEFAULTS + CONFIG.format(route=route))
        script.write_text(HAPROXY_SCRIPT)
        command = ["/bin/sh", str(script), "-db", "-f", str(config)]
        subprocess.run(command, check=True, env={"HAPROXY_BINARY": "/bin/true", "PATH": "/usr/bin:/bin"})
        return config.read_text()

    return change


def test_only_loopback_is_listened_on(changed):
    assert "bind 127.0.0.1:9101" in changed(ROUTE) and "bind 127.0.0.1:8404" in changed(ROUTE)


def test_a_request_is_kept_until_its_body_has_come(changed):
    assert "    option http-buffer-request\n    timeout http-request 60s\n" in changed(ROUTE)
    assert "    http-reuse never\n" in changed(ROUTE)


def test_clients_are_taken_in_once_there_is_a_door(changed):
    assert "bind 127.0.0.1:8000" in changed(ROUTE)
    assert "bind 127.0.0.1:8000" not in changed("")
