"""Ports for a cluster on this machine."""

import socket
from pathlib import Path

import pytest

from cluster.serving import local_environment


def test_a_port_is_one_that_no_connection_is_given():
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert local_environment.free_port() in local_environment.FREE_PORTS
    assert local_environment.FREE_PORTS[-1] < int(first)


def test_a_port_is_one_where_nobody_listens(monkeypatch):
    port = local_environment.free_port()
    monkeypatch.setattr(local_environment, "FREE_PORTS", range(port, port + 1))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="no port is free"):
        local_environment.free_port()
    assert local_environment.free_port() == port
