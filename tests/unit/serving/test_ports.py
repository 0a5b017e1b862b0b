"""Ports for a cluster on this machine."""

import socket
from pathlib import Path

import pytest

from deploy.serving import ports as given

SERVES_FIRST_PORT = 30_000  # that Ray gives to a door


def test_a_port_is_one_that_no_connection_is_given():
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert given.free_port() in given.FREE_PORTS
    assert given.FREE_PORTS[-1] < given.AGENT_PORTS[0]
    assert given.AGENT_PORTS[-1] < SERVES_FIRST_PORT < int(first)


def test_agents_get_ports_of_their_own():
    ports = given.agent_ports(4)
    assert len(set(ports)) == 4 and set(ports) < set(given.AGENT_PORTS)


def test_a_port_is_one_where_nobody_listens(monkeypatch):
    port = given.free_port()
    monkeypatch.setattr(given, "FREE_PORTS", range(port, port + 1))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="no port is free"):
        given.free_port()
    assert given.free_port() == port
