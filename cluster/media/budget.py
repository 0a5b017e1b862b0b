"""What one look at one item may cost: wall time and packets. One DecodeBudget for each `probe` or `decode`, of one thread."""

from __future__ import annotations

import io
import time

from cluster.errors import MediaError
from cluster.media.settings import MediaLimits


class DecodeBudget:
    """Starts when it is made. C libraries cannot be interrupted; they are stopped where they next read the file."""

    def __init__(self, limits: MediaLimits):
        self.limits = limits
        self._ends_at = time.monotonic() + limits.max_decode_s
        self._packets_left = limits.max_packets

    def check(self) -> None:
        """Call between frames, packets and reads. Raises MediaError when the time is over."""
        if time.monotonic() > self._ends_at:
            raise MediaError(f"takes longer than {self.limits.max_decode_s:g} seconds to decode")

    def take_packet(self) -> None:
        self.check()
        self._packets_left -= 1
        if self._packets_left < 0:
            raise MediaError(f"more than {self.limits.max_packets} packets are not accepted")

    def file(self, data: bytes) -> io.BytesIO:
        """The bytes as a file whose reads and seeks raise MediaError when the time is over."""
        return _TimedFile(data, self)


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
