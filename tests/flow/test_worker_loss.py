"""A worker's process dies while it works for many requests. Its items go to another encoder, and no client
notices; requests of a dead prefill worker fail by name. What other workers had granted it is free long before
the leases are over."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest

from bench.workload import Reference, make_cases
from cluster.errors import UnavailableError
from cluster.types.members import ProcessId
from cluster.worker.process import WorkerProcess
from kv_transfer.agents.factory import _LOCAL_NETWORK as network
from kv_transfer.lease.processes import process_id
from router.openai.app import build_api
from tests.fakes.local_prefill import let_prefill_locally
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_cancel import call_for
from tests.flow.test_law import MAX_TOKENS, MODEL, ask, cluster_args

NUM_CASES = 24


class StandIn:
    """The process that a worker says it is: it can be killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        known = process_id(self._child.pid)
        assert known is not None

        def processes(process: WorkerProcess) -> tuple[ProcessId, ...]:
            return (known,) if process._setup.replica_id.startswith(name) else own.__get__(process)

        own = WorkerProcess.processes
        monkeypatch.setattr(WorkerProcess, "processes", property(processes))

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class Loss:
    """Takes a worker down when it is about to run its n-th batch."""

    def __init__(self, victim, verb: str, num_batches: int, stand_in: StandIn):
        self._victim = victim
        self._stand_in = stand_in
        self._left = num_batches
        self._loop = asyncio.get_running_loop()
        self.has_happened = asyncio.Event()
        runner = victim._engine._runner
        self._run = getattr(runner, verb)
        setattr(runner, verb, self._count)

    def _count(self, *args, **kwargs):
        self._left -= 1
        if self._left == 0:
            asyncio.run_coroutine_threadsafe(self._down(), self._loop)
        return self._run(*args, **kwargs)

    async def _down(self) -> None:
        """Its connections end, and it writes nothing any more, as when a process is killed."""
        network.kill(self._victim.replica_id)
        self._stand_in.kill()
        self._victim._process.shell._hang_up()
        self.has_happened.set()


@pytest.fixture
def stand_in(monkeypatch, request):
    stand_in = StandIn(monkeypatch, request.param)
    yield stand_in
    stand_in.kill()


def peers_of(cluster: LocalCluster, role: str) -> list:
    return [peer for peer in cluster.door.peers if peer.member.role == role]


@pytest.mark.parametrize("stand_in", ["e0"], indirect=True)
async def test_the_items_of_an_encoder_that_dies_are_encoded_elsewhere(stand_in):
    reference = Reference(MODEL)
    cases = [case for case in make_cases(23, 2 * NUM_CASES) if case.kind != "text"][:NUM_CASES]
    expected = [reference.answer(case, MAX_TOKENS).text for case in cases]
    async with local_cluster(cluster_args(64), (2, 1, 1)) as cluster:
        loss = Loss(cluster.encoders[0], "encode", 2, stand_in)
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            answers = await asyncio.gather(*(ask(client, case) for case in cases))
        assert loss.has_happened.is_set()
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected
        assert len(peers_of(cluster, "encode")) == 1


@pytest.mark.parametrize("stand_in", ["p0"], indirect=True)
async def test_blocks_that_were_granted_to_a_prefill_worker_that_dies_are_free_soon(stand_in):
    """The audit of `local_cluster` waits for a sixth of a lease's time."""
    reference = Reference(MODEL)
    cases = make_cases(31, NUM_CASES)
    expected = [reference.answer(case, MAX_TOKENS).text for case in cases]

    async def answer(cluster: LocalCluster, case) -> str:
        (choice,) = await cluster.door.chat(call_for(case, max_tokens=MAX_TOKENS))
        try:
            return "".join([delta.text async for delta in choice])
        finally:
            await choice.aclose()

    async with local_cluster(cluster_args(64), (1, 2, 1)) as cluster:
        let_prefill_locally(cluster.door, lambda _: False)  # text, too, is to travel
        loss = Loss(cluster.prefills[0], "run", 3, stand_in)
        outcomes = await asyncio.gather(*(answer(cluster, case) for case in cases), return_exceptions=True)
        assert loss.has_happened.is_set()
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert failed
        for error in failed:  # the door may hear of the loss first from an encoder that was sending there
            lost = ("the prefill worker was lost", "embeddings could not be sent to prefill")
            assert isinstance(error, UnavailableError) and str(error).startswith(lost), error
        for outcome, right in zip(outcomes, expected, strict=True):
            assert outcome == right or outcome in failed
        assert len(peers_of(cluster, "prefill")) == 1
