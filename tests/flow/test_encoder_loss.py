"""An encoder dies while it works for many requests: another takes its items over, and no client notices."""

from __future__ import annotations

import asyncio

import httpx

from bench.workload import Reference, make_cases
from router.openai.app import build_api
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_law import MAX_TOKENS, MODEL, ask, cluster_args

NUM_CASES = 24


class Loss:
    """Takes an encoder down when it is about to encode its n-th batch."""

    def __init__(self, cluster: LocalCluster, num_batches: int):
        self._cluster = cluster
        self._victim = cluster.encoders[0]
        self._left = num_batches
        self._loop = asyncio.get_running_loop()
        self.has_happened = asyncio.Event()
        runner = self._victim._engine._runner
        self._encode, runner.encode = runner.encode, self._count

    def _count(self, *args, **kwargs):
        self._left -= 1
        if self._left == 0:
            asyncio.run_coroutine_threadsafe(self._down(), self._loop)
        return self._encode(*args, **kwargs)

    async def _down(self) -> None:
        """Its connections end as they do when a process is killed."""
        self._victim._process.shell._hang_up()
        self.has_happened.set()


async def test_the_items_of_an_encoder_that_dies_are_encoded_elsewhere():
    reference = Reference(MODEL)
    cases = [case for case in make_cases(23, 2 * NUM_CASES) if case.kind != "text"][:NUM_CASES]
    expected = [reference.answer(case, MAX_TOKENS).text for case in cases]
    async with local_cluster(cluster_args(64), (2, 1, 1)) as cluster:
        loss = Loss(cluster, 2)
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            answers = await asyncio.gather(*(ask(client, case) for case in cases))
        assert loss.has_happened.is_set()
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected
        assert len([peer for peer in cluster.door.peers if peer.member.role == "encode"]) == 1
