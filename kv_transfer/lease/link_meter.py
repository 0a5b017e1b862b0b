"""The writer's connections to the owners of memory, and how fast bytes get there, measured by every write.
Agent's thread, except where a method says more."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cluster.types.curves import Link
from kv_transfer.agents.agent import Agent, TransferError, TransferHandle, TransferState

MIN_MEASURED_BYTES = 256 << 10  # the duration of smaller writes says little about a link
NEW_SHARE = 0.25  # of the newest measurement
MOSTLY_BYTES = 2.0  # times what a small write takes, below which a duration says little about bytes
MAX_GAP_S = 0.005  # a thread that looks every millisecond comes back in less, unless something holds it up


class LinkMeter:
    """Bytes over the time in which any were in flight; newer times weigh more.

    The mean is over seconds per byte, not over speeds: a link that has become slow shows at once.

    When the last write in flight ended is known only within a gap: from the last instant at which the thread
    posted or found a write PENDING to the one at which it found all DONE. A thread that comes back late is no
    slow link. So a measurement is an interval, and what counts is the duration in it that is nearest to what
    the known speed predicts: the link is not called slower than the gap's begin proves, nor faster than its
    end does. A link whose speed is not known yet is measured by the end of gaps up to MAX_GAP_S alone. Where
    the transport knows when a write ended (`Agent.ended_at`), there is no gap.

    The least that a small write has taken is in every write, and is not counted as time of its bytes.
    Over a fast link a large write may take hardly longer than a small one. It says nothing of the bytes then,
    but that the link is at least so fast: between two processes on an H100 such writes made a link of 134
    GB/s look like one of 1 GB/s.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # None until a large write has ended
        self.latency_s = 0.0  # 0 until a small write has ended
        self._least_s = math.inf  # that a small write has taken
        self._num_in_flight = 0
        self._num_bytes = 0
        self._since = 0.0
        self._pending_at = 0.0  # when a write was last known to be in flight, or was just posted

    def posted(self, num_bytes: int, at: float, returned_at: float) -> None:
        """`at`: seconds, before the transport got the write; `returned_at`: after its call, in which it may
        have copied the bytes."""
        if self._num_in_flight == 0:
            self._since, self._num_bytes = at, 0
        self._num_in_flight += 1
        self._num_bytes += num_bytes
        self._pending_at = returned_at

    def pending(self, at: float) -> None:
        """A write was found in flight."""
        self._pending_at = at

    def cancelled(self) -> None:
        """A write will never arrive: the writes that are in flight with it are not measured."""
        self._num_in_flight -= 1
        self._num_bytes = 0

    def arrived(self, at: float, ended_at: float | None = None) -> None:
        """A write was found DONE. `ended_at`: when it ended, if the transport knows."""
        self._num_in_flight -= 1
        if self._num_in_flight or self._num_bytes == 0:
            return
        end = at if ended_at is None else min(at, ended_at)
        begin = min(end, self._pending_at) if ended_at is None else end
        self._measure(begin - self._since, end - self._since)

    def _measure(self, min_s: float, max_s: float) -> None:
        if max_s <= 0:
            return
        is_small = self._num_bytes < MIN_MEASURED_BYTES
        bytes_s = self._num_bytes / (self.bytes_per_s or math.inf)
        known_s = self.latency_s + bytes_s if is_small else bytes_s
        if (is_small and not self.latency_s) or (not is_small and not self.bytes_per_s):
            if max_s - min_s > MAX_GAP_S:
                return
            known_s = max_s
        took_s = min(max(known_s, min_s), max_s)
        if is_small:
            newest = max(0.0, took_s - bytes_s)
            self._least_s = min(self._least_s, newest)
            self.latency_s += (NEW_SHARE if self.latency_s else 1.0) * (newest - self.latency_s)
            return
        fixed_s = 0.0 if self._least_s == math.inf else self._least_s
        if took_s >= MOSTLY_BYTES * fixed_s:
            newest = (took_s - fixed_s) / self._num_bytes
            old = newest if self.bytes_per_s is None else 1 / self.bytes_per_s
            self.bytes_per_s = 1 / (old + NEW_SHARE * (newest - old))
        elif self.bytes_per_s is not None:
            self.bytes_per_s = max(self.bytes_per_s, self._num_bytes / took_s)


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
