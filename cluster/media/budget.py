"""Limits of wall time and packets for one `probe` or `decode` of one item. Each has its own DecodeBudget, on
one thread."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

from cluster.errors import MediaError
from cluster.media.settings import MediaLimits


class DecodeBudget:
    """The time starts when the object is made. C libraries cannot be interrupted; their next read of the file
    stops them."""

    def __init__(
        self,
        limits: MediaLimits,
        timeout_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """`timeout_s`: replaces the time limit if it is shorter."""
        self.limits = limits
        self._timeout_s = limits.max_decode_s if timeout_s is None else min(timeout_s, limits.max_decode_s)
        self._now = now
        self._ends_at = now() + self._timeout_s
        self._packets_left = limits.max_packets

    def check(self) -> None:
        """Call it between frames, packets and reads. Raises MediaError when the time is over."""
        if self._now() > self._ends_at:
            raise MediaError(too_slow(self._timeout_s))

    def take_packet(self) -> None:
        self.check()
        self._packets_left -= 1
        if self._packets_left < 0:
            raise MediaError(f"more than {self.limits.max_packets} packets are not accepted")

    def file(self, data: bytes) -> io.BytesIO:
        """The bytes as a file whose reads and seeks raise MediaError when the time is over."""
        return _TimedFile(data, self)


def too_slow(timeout_s: float) -> str:
    return f"takes longer than {timeout_s:g} seconds to decode"


class _TimedFile(io.BytesIO):
    def __init__(self, data: bytes, budget: DecodeBudget):
        super().__init__(data)
        self._budget = budget

    def read(self, size: int | None = -1, /) -> bytes:
        self._budget.check()
        return super().read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._budget.check()
        return super().seek(offset, whence)
