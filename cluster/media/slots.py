"""A few slots for many tenants' work. The tenant with the fewest slots goes next, and no tenant has more than
its maximum.

Belongs to one event loop. Within a tenant the order is that of arrival. A cancelled caller frees its slot, or
stops waiting.
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
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # tenants in the order of their last grant

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a slot and frees it at the end of the block."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(tenant)  # granted and cancelled at the same time
            else:
                self._forget(tenant, granted)
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
            queue = self._waiting.pop(tenant)
            granted = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # after the others
            if not granted.done():
                self._num_free -= 1
                self._held[tenant] += 1
                granted.set_result(None)

    def _forget(self, tenant: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[tenant]

    def _release(self, tenant: str) -> None:
        self._num_free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()
