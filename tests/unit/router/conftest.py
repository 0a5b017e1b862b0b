"""A door for the tests of its dispatcher; at its end every flight has landed and every work is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.clock import SystemClock
from cluster.config.settings import AdmissionArgs, DoorArgs
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.messages import Cancel
from router.admission.entrance import Entrance
from router.admission.queue import AdmissionQueue, Capacity
from router.flow.dispatch import Dispatcher
from router.flow.placing import Placing
from router.policy import ClusterView, JointPolicy
from tests.unit.router.scripted_door import Door, FakeMembers


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    calls: dict[str, asyncio.Future] = {}

    async def call_decode(replica_id: str, request_id: str) -> None:
        await calls.setdefault(request_id, asyncio.get_running_loop().create_future())

    timeouts = DoorArgs(first_token_timeout_s=0.2, request_timeout_s=0.4)
    clock = SystemClock()
    cluster = ClusterView(SchedulingPolicy(5.0, 2000.0, 0.3), 1.0, 2)
    queue = AdmissionQueue(AdmissionArgs(), 0.3, Capacity(0, 0, 0))
    dispatcher = Dispatcher(
        Placing(JointPolicy(), cluster, 16), Entrance(queue, clock), call_decode, timeouts, clock
    )
    door = Door(dispatcher, FakeMembers(), cluster, calls)
    door.dispatcher.members = door.members
    for peer in door.members.peers.values():
        door.dispatcher.on_joined(peer)
    yield door
    for call in calls.values():
        if not call.done():
            call.set_result(None)
    await asyncio.sleep(0.01)
    assert door.dispatcher.num_flights == 0
    for role, peer in door.members.peers.items():
        assert peer.num_flights == 0, role
        cancels = [m for m in door.members.connections[role].sent if m == Cancel("r")]
        assert len(cancels) <= 1, role
    assert not door.dispatcher._calls
    assert not any(door.units().values()) and queue.is_idle
