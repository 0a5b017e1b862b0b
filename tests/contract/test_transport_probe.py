"""The probe of NIXL at start, over CPU memory, between two real processes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import ConfigError
from cluster.worker import setup as worker_setup
from kv_transfer.agents import transport_probe
from kv_transfer.agents.nixl_agent import NixlAgent
from tests.contract.agents import HANG_S


def test_bytes_arrive_and_the_transport_has_a_speed():
    assert 1e5 < transport_probe.probe_transport(torch.device("cpu"), HANG_S) < 1e12


def test_other_bytes_than_were_sent_are_noticed(monkeypatch):
    post = NixlAgent.post
    monkeypatch.setattr(
        NixlAgent, "post", lambda self, peer, local, remote: post(self, peer, local[:-1], remote[:-1])
    )
    with pytest.raises(ConfigError, match="the bytes that arrived are not those that were sent"):
        transport_probe.probe_transport(torch.device("cpu"), HANG_S)


def test_a_process_that_cannot_take_part_is_an_error_in_time(monkeypatch):
    monkeypatch.setattr(transport_probe.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="NIXL does not move memory of cpu"):
        transport_probe.probe_transport(torch.device("cpu"), timeout_s=5.0)


def args_of(transport: str) -> Any:
    return SimpleNamespace(transport=transport)


@pytest.mark.parametrize(("speed", "level"), [(3e9, logging.WARNING), (200e9, logging.INFO)])
def test_a_slow_transport_is_a_warning(monkeypatch, caplog, speed, level):
    monkeypatch.setattr(worker_setup, "probe_transport", lambda device: speed)
    setup: Any = SimpleNamespace(device=torch.device("cuda"), replica_id="p", transport="nixl")
    with caplog.at_level(logging.INFO):
        worker_setup.check_device_transport(setup)
    (record,) = caplog.records
    assert record.levelno == level and f"{speed / 1e9:.1f} GB/s" in record.getMessage()


def test_a_cpu_and_other_transports_are_not_checked(monkeypatch):
    monkeypatch.setattr(worker_setup, "probe_transport", lambda device: pytest.fail("checked"))
    for device, transport in (("cpu", "nixl"), ("cuda", "collective")):
        setup: Any = SimpleNamespace(device=torch.device(device), replica_id="p", transport=transport)
        assert worker_setup.check_device_transport(setup) is None
