"""A few places for many tenants' work: the tenant with the fewest places goes next, and none has all of them.

Belongs to one event loop. Within a tenant the order is that of arrival. A caller that is cancelled gives up its place, or its wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    def __init__(self, num_slots: int, max_per_tenant: int):
        self._num_free = num_slots
        self._max_per_tenant = max_per_tenant
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # tenants in the order of their last turn

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a place; it is free again at the end of the block."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant)  # granted and cancelled at once
            else:
                self._forget(tenant, turn)
            raise
        try:
            yield
        finally:
            self._release(tenant)

    def _grant(self) -> None:
        while self._num_free:
            able = [tenant for tenant in self._waiting if self._held[tenant] < self._max_per_tenant]
            if not able:
                return
            tenant = min(able, key=self._held.__getitem__)
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():
                self._num_free -= 1
                self._held[tenant] += 1
                turn.set_result(None)

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]

    def _release(self, tenant: str) -> None:
        self._num_free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()
