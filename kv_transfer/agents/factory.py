"""The agent that a configuration asks for. The transports' libraries are loaded only where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kv_transfer.agents.agent import Agent
from kv_transfer.agents.in_process import InProcessNetwork

Transport = Literal["nixl", "collective", "in_process"]

_LOCAL_NETWORK = InProcessNetwork()  # joins all agents of this process


def make_agent(
    transport: Transport, name: str, host: str = "127.0.0.1", net_devices: Sequence[str] = ("lo",)
) -> Agent:
    """An agent of this process. Raises ConfigError if the transport is not available here.

    `host`: the address that the collective transport listens on. `net_devices`: network devices that NIXL may
    use. The defaults make an agent for peers on this host.
    """
    if transport == "in_process":
        return _LOCAL_NETWORK.agent(name)
    if transport == "collective":
        from kv_transfer.agents.collective_agent import CollectiveAgent

        return CollectiveAgent(name, host)
    from kv_transfer.agents.nixl_agent import NixlAgent

    return NixlAgent(name, net_devices)
