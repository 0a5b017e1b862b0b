"""The clock that objects with deadlines take as a constructor argument, so that tests need not sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic clock; only differences mean anything."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()
