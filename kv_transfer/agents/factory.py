"""Which agent a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kv_transfer.agents.agent import Agent
from kv_transfer.agents.in_process import InProcessNetwork

Transport = Literal["nixl", "collective", "in_process"]

_LOCAL_NETWORK = InProcessNetwork()  # joins all agents of this process; there can be only one of it


def make_agent(
    transport: Transport, name: str, host: str = "127.0.0.1", net_devices: Sequence[str] = ("lo",)
) -> Agent:
    """An agent of this process. Raises ConfigError when the transport cannot be had here.

    `host` is the address that the collective transport listens on, `net_devices` are those that NIXL may use. Without them the
    agent is for peers on this host.
    """
    if transport == "in_process":
        return _LOCAL_NETWORK.agent(name)
    if transport == "collective":
        from kv_transfer.agents.collective_agent import (
            CollectiveAgent,  # torch.distributed; only where it is used
        )

        return CollectiveAgent(name, host)
    from kv_transfer.agents.nixl_agent import NixlAgent  # loads UCX; only where it is used

    return NixlAgent(name, net_devices)
