"""Places that tenants share."""

from __future__ import annotations

import asyncio

from cluster.media.slots import FairSlots


class Room:
    """Callers that stay until they are let go, and the order in which they came in."""

    def __init__(self, num_slots: int, max_per_tenant: int):
        self.slots = FairSlots(num_slots, max_per_tenant)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task] = {}
        self.gates: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """The tenant is the first letter."""
        for name in names:
            self.gates[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self._stay(name))
        await self.settle()

    async def go(self, name: str) -> None:
        self.gates[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _stay(self, name: str) -> None:
        async with self.slots.slot(name[0]):
            self.inside.append(name)
            try:
                await self.gates[name].wait()
            finally:
                self.inside.remove(name)


async def test_no_tenant_has_all_places_and_the_one_with_fewest_goes_next():
    room = Room(3, 2)
    await room.come("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert room.inside == ["a1", "a2", "b1"]
    await room.go("a1")
    assert room.inside == ["a2", "b1", "c1"], "b and a have one already"
    await room.go("c1")
    await room.go("a2")
    assert room.inside == ["b1", "a3", "b2"]
    for name in ("b1", "b2", "a3", "a4"):
        await room.go(name)
    assert room.inside == [] and room.slots.num_waiting == 0
    await room.come("d1", "d2", "e1")
    assert room.inside == ["d1", "d2", "e1"], "all places are free again"
    for name in ("d1", "d2", "e1"):
        await room.go(name)


async def test_within_a_tenant_the_order_is_that_of_arrival():
    room = Room(1, 1)
    await room.come("a1", "a2", "a3")
    for name in ("a1", "a2", "a3"):
        assert room.inside == [name]
        await room.go(name)


async def test_who_is_cancelled_gives_up_its_wait_or_its_place():
    room = Room(1, 1)
    await room.come("a1", "a2", "b1", "b2")
    await room.cancel("a2")
    await room.cancel("b2")
    assert room.slots.num_waiting == 1
    await room.cancel("a1")
    assert room.inside == ["b1"] and room.slots.num_waiting == 0
    await room.go("b1")


async def test_a_place_that_is_granted_in_the_moment_of_a_cancellation_is_free_again():
    room = Room(1, 1)
    await room.come("a1", "b1", "c1")
    room.gates["a1"].set()
    await asyncio.sleep(0)  # a1 leaves, b1 has the place and does not know it yet
    room.tasks["b1"].cancel()
    await room.settle()
    assert room.inside == ["c1"]
    await room.go("c1")
    await room.come("d1")
    assert room.inside == ["d1"], "nothing is held any more"
    await room.go("d1")
