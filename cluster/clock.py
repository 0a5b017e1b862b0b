"""The clock is a constructor argument, so that deadlines can be tested without sleeping."""

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
