"""How fast bytes get to a peer, measured by every write. Belongs to the agent's thread."""

from __future__ import annotations

import math

MIN_MEASURED_BYTES = 256 << 10  # the duration of smaller writes says little about a link
NEW_SHARE = 0.25  # of the newest measurement


class LinkMeter:
    """Bytes over the time in which any were in flight; newer times weigh more.

    The mean is over seconds per byte, not over speeds: a link that has become slow shows at once.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # None until a large write has ended
        self.latency_s = 0.0  # 0 until a small write has ended
        self._num_in_flight = 0
        self._num_bytes = 0
        self._since = 0.0

    def posted(self, num_bytes: int, at: float) -> None:
        """`at`: seconds, before the transport got the write."""
        if self._num_in_flight == 0:
            self._since, self._num_bytes = at, 0
        self._num_in_flight += 1
        self._num_bytes += num_bytes

    def cancelled(self) -> None:
        """A write will never arrive: the writes that are in flight with it are not measured."""
        self._num_in_flight -= 1
        self._num_bytes = 0

    def arrived(self, at: float) -> None:
        self._num_in_flight -= 1
        took_s = at - self._since
        if self._num_in_flight or self._num_bytes == 0 or took_s <= 0:
            return
        if self._num_bytes < MIN_MEASURED_BYTES:
            newest = max(0.0, took_s - self._num_bytes / (self.bytes_per_s or math.inf))
            self.latency_s += (NEW_SHARE if self.latency_s else 1.0) * (newest - self.latency_s)
            return
        newest = took_s / self._num_bytes
        old = newest if self.bytes_per_s is None else 1 / self.bytes_per_s
        self.bytes_per_s = 1 / (old + NEW_SHARE * (newest - old))
