"""How many bytes an encoder call may be estimated to need: what was free at the start, until a call runs out
of memory.

The estimate of a call is `cluster.worker.memory_plan.encoder_step_bytes` and its input tensors. After a call
that ran out of memory, the budget is half of that call's estimate. After every `RECOVERY_S` without another
such call the budget doubles, up to its first value.
"""

from __future__ import annotations

from cluster.clock import Clock

RECOVERY_S = 60.0  # time in which another process, or a fragmented allocator, may return the memory


class CallBudget:
    """The bytes that a call may be estimated to need. Used on the engine's thread only."""

    def __init__(self, ceiling_bytes: int, clock: Clock):
        self._ceiling_bytes = ceiling_bytes
        self._clock = clock
        self._max_bytes = ceiling_bytes
        self._changed_at = clock.now()

    @property
    def max_bytes(self) -> int:
        now = self._clock.now()
        while self._max_bytes < self._ceiling_bytes and now - self._changed_at >= RECOVERY_S:
            self._max_bytes = min(2 * self._max_bytes, self._ceiling_bytes)
            self._changed_at += RECOVERY_S
        return self._max_bytes

    def lower(self, tried_bytes: int) -> None:
        """A call of this estimate has run out of memory."""
        self._max_bytes = max(1, min(self.max_bytes, tried_bytes // 2))
        self._changed_at = self._clock.now()
