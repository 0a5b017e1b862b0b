"""The writer's connections to the owners of memory, and how fast each is. Agent's thread, except where a
method says more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cluster.types.curves import Link
from kv_transfer.agents.agent import Agent, TransferError, TransferHandle, TransferState
from kv_transfer.lease.link_meter import LinkMeter


class PeerLinks:
    """The writing verbs of the agent, measured."""

    def __init__(self, agent: Agent, now: Callable[[], float], on_lost: Callable[[str, TransferError], None]):
        """`on_lost(peer, error)`: all leases to the peer fail."""
        self._agent = agent
        self._now = now
        self._on_lost = on_lost
        self._meters: dict[str, LinkMeter] = {}  # by peer
        self._peers: dict[bytes, str] = {}  # by the agent metadata in the grants

    @property
    def measured(self) -> dict[str, Link]:
        """The link to every peer whose speed has been measured. Any thread."""
        meters = list(self._meters.items())
        return {
            peer: Link(meter.latency_s, meter.bytes_per_s)
            for peer, meter in meters
            if meter.bytes_per_s is not None
        }

    def bytes_per_s(self, agent_metadata: bytes) -> float | None:
        """None: not measured. Any thread."""
        meter = self._meters.get(self._peers.get(agent_metadata, ""))
        return None if meter is None else meter.bytes_per_s

    def connect(self, agent_metadata: bytes) -> str:
        peer = self._peers[agent_metadata] = self._agent.connect(agent_metadata)
        return peer

    def post(self, peer: str, local: np.ndarray, remote: np.ndarray, at: float) -> TransferHandle:
        """`Agent.post`. `at`: the time just before."""
        handle = self._agent.post(peer, local, remote)
        self._meters.setdefault(peer, LinkMeter()).posted(int(local[:, 1].sum()), at, self._now())
        return handle

    def poll(self, peer: str, handle: TransferHandle) -> TransferState:
        """`Agent.poll`, until it is no longer PENDING; not after that."""
        state = TransferState.FAILED
        try:
            state = self._agent.poll(handle)
        finally:
            if (meter := self._meters.get(peer)) is not None:
                if state is TransferState.DONE:
                    meter.arrived(self._now(), self._agent.ended_at(handle))
                elif state is TransferState.PENDING:
                    meter.pending(self._now())
                elif state is TransferState.FAILED:
                    meter.cancelled()
        return state

    def release(self, handle: TransferHandle) -> None:
        """`Agent.release`, of a write that is over."""
        self._agent.release(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        self._agent.notify(peer, payload)

    def lose(self, peer: str, error: TransferError) -> None:
        """The peer is gone, for all leases at once. After the disconnect no write to it is PENDING."""
        self._on_lost(peer, error)
        self._meters.pop(peer, None)
        self._peers = {metadata: name for metadata, name in self._peers.items() if name != peer}
        self._agent.disconnect(peer)
