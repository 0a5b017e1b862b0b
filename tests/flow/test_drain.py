"""Workers that must go, as on scale-down, finish what the doors have given them; the clients notice
nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from bench.workload import Case, Reference, make_cases
from cluster.types.members import Role
from router.api.app import build_api
from router.door import Door
from router.policy.baselines import RoundRobinPolicy
from tests.fakes.slow_params import often
from tests.flow.local_cluster import HANG_S, local_cluster, with_policy
from tests.flow.test_law import MAX_TOKENS, MODEL, ask, cluster_args

NUM_CASES = 8


@pytest.fixture(scope="module")
def media_cases() -> list[tuple[Case, str]]:
    """With the answers' texts."""
    reference = Reference(MODEL)
    cases = [case for case in make_cases(29, 2 * NUM_CASES) if case.kind != "text"][:NUM_CASES]
    return [(case, reference.answer(case, MAX_TOKENS).text) for case in cases]


# Workers by role, and requests
CLUSTERS = {
    Role.ENCODE: ((2, 2, 2), NUM_CASES),
    Role.PREFILL: ((2, 2, 2), NUM_CASES),
    Role.DECODE: ((2, 2, 2), NUM_CASES),
    Role.ENCODE_PREFILL: ((0, 0, 1, 0, 2), NUM_CASES // 2),
    Role.WHOLE: ((0, 0, 0, 0, 0, 2), NUM_CASES // 2),
}


@pytest.mark.parametrize("role", often(CLUSTERS, [Role.ENCODE, Role.DECODE]))
async def test_a_worker_that_must_go_first_finishes_its_requests(media_cases, role):
    num_replicas, num_cases = CLUSTERS[role]
    cases, expected = zip(*media_cases[:num_cases], strict=True)
    args = with_policy(cluster_args(64), RoundRobinPolicy)  # doors use each worker, however fast it seems
    async with local_cluster(args, num_replicas, num_doors=2) as cluster:
        workers = (*cluster.encoders, *cluster.prefills, *cluster.decodes)
        of_role = {peer.member.replica_id for peer in cluster.door.peers if peer.member.role is role}
        leaving = next(worker for worker in workers if worker.replica_id in of_role)

        def leaving_peers():
            peers = [peer for door in cluster.doors for peer in door.peers]
            return [peer for peer in peers if peer.member.replica_id == leaving.replica_id]

        async def answers_of(door, some):
            transport = httpx.ASGITransport(build_api(door))
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
                return await asyncio.gather(*(ask(client, case) for case in some))

        async with asyncio.timeout(HANG_S):
            while not all(knows_speed(door, leaving.replica_id) for door in cluster.doors):
                await asyncio.sleep(0.001)
        may_work = threading.Event()
        engine: Any = leaving.process.seat.engine
        step = engine.step
        # It finishes nothing before it must go; its thread is alive meanwhile.
        engine.step = lambda: step() if may_work.is_set() else 0.001
        half = num_cases // 2
        asking = [
            asyncio.ensure_future(answers_of(door, some))
            for door, some in zip(cluster.doors, (cases[:half], cases[half:]), strict=True)
        ]
        async with asyncio.timeout(HANG_S):
            while not all(
                w.num_requests
                for door in cluster.doors
                for w in door.workers
                if w.replica_id == leaving.replica_id
            ):
                await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(leaving.drain(60.0))
        for door in cluster.doors:
            listed = [peer.member for peer in door.peers if peer.member.role is role]
            door.update_members(role, [m for m in listed if m.replica_id != leaving.replica_id])
        await asyncio.sleep(0)
        assert not draining.done()
        may_work.set()
        await draining
        assert engine.load().is_idle and leaving_peers() == []
        answers = [answer for some in await asyncio.gather(*asking) for answer in some]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == list(expected)


def knows_speed(door: Door, replica_id: str) -> bool:
    """Whether the worker has told the door how fast it is. A step of its engine does that."""
    pools = door.dispatcher.flow._placer.cluster._pools_of(replica_id)
    return any(replica_id in measured for pool in pools for measured in pool._measured.values())


async def test_a_worker_does_not_wait_longer_than_it_is_given_nor_without_doors():
    async with local_cluster(cluster_args(64)) as cluster:
        assert await ends(cluster.prefills[0].drain(0.01))
        await cluster.door.aclose()
        assert await ends(cluster.prefills[0].drain(3600.0))


async def ends(drain: Coroutine[Any, Any, None]) -> bool:
    done, _ = await asyncio.wait([asyncio.ensure_future(drain)], timeout=HANG_S)
    return bool(done)
