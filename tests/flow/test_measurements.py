"""What workers say of themselves: their speed, their prefix cache, and where the time of each request
went."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

import httpx
import msgspec

from bench.workload import make_cases
from cluster.rpc import Connection, connect
from cluster.types.members import Member, Role
from cluster.types.messages import (
    BlocksChanged,
    Encoded,
    Measured,
    StartDecode,
    StartEncode,
    StartPrefill,
    Tokens,
)  # fmt: skip
from cluster.types.timings import EncodeTiming, PrefillTiming
from router.api.app import build_api
from tests.fakes.waiting import until
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_law import ask, cluster_args

NUM_CASES = 12
HEARD_TIMEOUT_S = 60.0


class Listener:
    """A door that asks for nothing."""

    def __init__(self) -> None:
        self.curves: dict[str, list[Measured]] = defaultdict(list)
        self.blocks: dict[str, set[bytes]] = defaultdict(set)
        self._connections: list[Connection] = []

    async def listen(self, members: list[Member]) -> None:
        for member in members:

            def hear(_: Connection, message: Any, name: str = member.replica_id) -> None:
                if isinstance(message, Measured):
                    self.curves[name].append(message)
                elif isinstance(message, BlocksChanged):
                    self.blocks[name] = (self.blocks[name] | set(message.added)) - set(message.evicted)

            connection = await connect(
                member.address, "listener", hear, lambda _: None, timeout_s=HEARD_TIMEOUT_S
            )
            self._connections.append(connection)

    async def aclose(self) -> None:
        for connection in self._connections:
            await connection.aclose()


class Wiretap:
    """Timings that come to a door, and how long that took from the message that began it."""

    def __init__(self, cluster: LocalCluster):
        self._began_at: dict[tuple[str, int | None], float] = {}
        self.media: list[tuple[EncodeTiming, float]] = []
        self.prefill: list[tuple[PrefillTiming, float]] = []
        dispatcher = cluster.door.dispatcher
        members = dispatcher.members
        self._send, members.send = members.send, self._tapped  # type: ignore[method-assign]
        self._hear, dispatcher.on_message = dispatcher.on_message, self._heard  # type: ignore[method-assign]

    def _tapped(self, replica_id: str, message: Any, owner: str = "") -> None:
        if isinstance(message, StartPrefill) or (isinstance(message, StartDecode) and message.prefills):
            self._began_at[message.request.request_id, None] = time.monotonic()
        elif isinstance(message, StartEncode):
            self._began_at[message.request_id, message.item_idx] = time.monotonic()
        self._send(replica_id, message, owner)

    def _heard(self, peer: Any, message: Any) -> None:
        now = time.monotonic()
        if isinstance(message, Encoded):
            wall_s = now - self._began_at[message.request_id, message.item_idx]
            self.media.append((message.timing, wall_s))
        for event in message.events if isinstance(message, Tokens) else ():
            if event.timing is not None:
                self.prefill.append((event.timing, now - self._began_at[event.request_id, None]))
        self._hear(peer, message)


def check_sums(timings: list[tuple[Any, float]]) -> None:
    for timing, wall_s in timings:
        parts = msgspec.structs.astuple(timing)
        assert min(parts) >= 0 and 0 < sum(parts) <= wall_s


async def test_a_door_knows_how_fast_everybody_is_what_prefill_has_and_where_the_time_went():
    cases = make_cases(31, NUM_CASES)
    num_items = sum(len(case.images) + len(case.videos) + len(case.sounds) for case in cases)
    async with local_cluster(cluster_args(64), measures=True) as cluster:
        early, late = Listener(), Listener()
        members = {peer.member.role: peer.member for peer in cluster.door.peers}
        names = {role: member.replica_id for role, member in members.items()}
        await early.listen(list(members.values()))
        await until(lambda: len(early.curves) == len(members))
        at_start = {role: early.curves[names[role]][0].curves for role in members}
        wiretap = Wiretap(cluster)
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            await asyncio.gather(*(ask(client, case) for case in cases))
        await late.listen(list(members.values()))
        pool = cluster.prefills[0].engine.blocks
        for listener in (early, late):
            await until(lambda heard=listener: heard.blocks[names[Role.PREFILL]] == set(pool.content()))
            await listener.aclose()

    encode, prefill, decode = (at_start[role] for role in (Role.ENCODE, Role.PREFILL, Role.DECODE))
    assert set(encode.encode) == set(encode.prepare) == set(members[Role.ENCODE].modalities)
    assert prefill.prefill is not None and prefill.prefill.seconds(64) > 0
    assert decode.decode is not None and decode.decode.seconds(8, 100) > 0
    assert len(pool.content()) > NUM_CASES
    assert len(wiretap.prefill) == NUM_CASES and len(wiretap.media) == num_items > 0
    check_sums(wiretap.prefill)
    check_sums(wiretap.media)
    assert all(timing.computing_s > 0 for timing, _ in wiretap.prefill)
    assert all(member.hardware for member in members.values())
