"""What an agent listens on: loopback, unless its owner names a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.settings import ClusterArgs, TransferArgs
from tests.contract.agents import BETWEEN_PROCESSES, fail_to_listen, listen, needs_nixl
from tests.contract.test_agent_processes import process_of, receive

NETWORKS = [
    entry.name
    for entry in Path("/sys/class/net").iterdir()
    if entry.name != "lo" and (entry / "operstate").read_text().strip() == "up"
]


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_an_agent_listens_on_loopback_only(kind):
    with process_of(listen, kind, None) as (pipe, _):
        found = receive(pipe)
    assert found and [text for is_local, text in found if not is_local] == []


@needs_nixl
def test_the_environment_does_not_move_a_nixl_agent_to_another_network():
    with process_of(listen, "nixl", None, environment={"UCX_NET_DEVICES": "all"}) as (pipe, _):
        found = receive(pipe)
    assert found and [text for is_local, text in found if not is_local] == []


@needs_nixl
@pytest.mark.skipif(not NETWORKS, reason="this machine has loopback only")
def test_a_nixl_agent_listens_on_the_networks_that_its_owner_names():
    with process_of(listen, "nixl", (*NETWORKS, "lo")) as (pipe, _):
        found = receive(pipe)
    assert {is_local for is_local, _ in found} == {True, False}


@needs_nixl
def test_a_network_device_that_is_not_there_is_refused_by_name():
    with process_of(fail_to_listen) as (pipe, _):
        param, message = receive(pipe)
    assert param == "transfer.net_devices" and "nosuch0" in message


def test_workers_of_one_host_keep_nixl_on_loopback():
    assert ClusterArgs().net_devices == ("lo",)
    assert ClusterArgs(transfer=TransferArgs(net_devices=("eth1",))).net_devices == ("lo",)
    several = ClusterArgs(side_channel="tcp", transfer=TransferArgs(net_devices=("eth1", "mlx5_0:1")))
    assert several.net_devices == ("eth1", "mlx5_0:1")


def test_nixl_between_hosts_needs_a_network_that_is_named():
    with pytest.raises(ValueError, match=r"needs transfer\.net_devices"):
        ClusterArgs(side_channel="tcp")
    assert ClusterArgs(side_channel="tcp", transport="collective").net_devices == ()
