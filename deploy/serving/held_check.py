"""Serve's health check of a replica as a call that stays open.

Serve notices at once that a process has ended while a call to it is open; otherwise it notices with its next
health check. So a check is answered after `HOLD_S`, and Serve, whose period is shorter, makes the next one
then: a lost replica is replaced without waiting for the next check. The first check is answered at once,
because Serve counts the replica as started only after it.

Runs on the replica's event loop. Imports no Ray.
"""

from __future__ import annotations

import asyncio

HOLD_S = 2.0


class HeldCheck:
    def __init__(self, hold_s: float = HOLD_S):
        self._hold_s = hold_s
        self._is_first = True

    async def hold(self) -> None:
        """Call it before the check itself, whose result is then new."""
        is_first, self._is_first = self._is_first, False
        if not is_first:
            await asyncio.sleep(self._hold_s)
