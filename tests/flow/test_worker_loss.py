"""A worker's process dies while it works for many requests. What it had goes on elsewhere, and clients
notice a pause at most. What other workers had granted it is free long before the leases are over."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest

from bench.workload import Case, Reference, make_cases
from cluster.types.members import ProcessId
from cluster.worker.process import WorkerProcess
from kv_transfer.agents.factory import _LOCAL_NETWORK as network
from kv_transfer.lease.processes import process_id
from router.api.app import build_api
from router.generation import Choice
from tests.fakes.local_prefill import let_prefill_locally
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_cancel import call_for
from tests.flow.test_law import MAX_TOKENS, MODEL, ask, cluster_args

NUM_CASES = 12  # each kind twice, each time with the same of FIELDS


class StandIn:
    """The process that a worker says it is: it can be killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        self.name = name
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


@pytest.fixture(autouse=True)
def _little_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one process nothing is: what a lost worker had been granted is free at once, and not after two
    seconds."""
    monkeypatch.setattr("kv_transfer.lease.receiver.IN_FLIGHT_S", 0.1)


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


FIELDS = [{}, {"temperature": 0.8, "seed": 7, "n": 2}, {"guidance_scale": 1.5, "negative_prompt": "a circle"}]


async def answer(cluster: LocalCluster, case: Case, fields: dict[str, object]) -> list[str]:
    """The texts of all choices."""
    choices = await cluster.door.chat(call_for(case, max_tokens=MAX_TOKENS, ignore_eos=True, **fields))

    async def read(choice: Choice) -> str:
        try:
            return "".join([delta.text async for delta in choice])
        finally:
            await choice.aclose()

    return await asyncio.gather(*map(read, choices))


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    """The answers of a cluster that loses nothing. Those that are greedy equal `generate`: see test_law."""

    async def undisturbed() -> list[list[str]]:
        async with local_cluster(cluster_args(64)) as cluster:
            return await asyncio.gather(*(answer(cluster, case, fields) for case, fields in asked()))

    return asyncio.run(undisturbed())


def asked() -> list[tuple[Case, dict[str, object]]]:
    return [(case, FIELDS[idx % len(FIELDS)]) for idx, case in enumerate(make_cases(31, NUM_CASES))]


@pytest.mark.parametrize(
    ("stand_in", "num_replicas"),
    [
        pytest.param("p0", (1, 2, 1), id="prefill"),
        pytest.param("p0", (1, 1, 1), id="the only prefill"),
        pytest.param("d0", (1, 1, 2), id="decode"),
        pytest.param("l0", (1, 0, 0, 2), id="language"),
        pytest.param("w0", (0, 0, 0, 0, 0, 2), id="whole"),
    ],
    indirect=["stand_in"],
)
async def test_what_a_lost_worker_had_goes_on_at_another(stand_in, num_replicas, expected):
    """Every kind of media, several choices that are drawn, and guidance: the tokens are those without a loss.
    If there is no other worker that prefills, decode computes the prompts of its answers.
    What others had granted the worker is free soon: the audit of `local_cluster` waits for a sixth of a
    lease's time."""
    async with local_cluster(cluster_args(64), num_replicas) as cluster:
        if num_replicas[1:] in ((2, 1), (1, 2)):
            let_prefill_locally(cluster.door, lambda _: False)  # text, too, is to travel
        victim = next(
            worker
            for worker in (*cluster.prefills, *cluster.decodes)
            if worker.replica_id[:2] == stand_in.name
        )
        loss = Loss(victim, "run", 6, stand_in)
        answers = await asyncio.gather(*(answer(cluster, case, fields) for case, fields in asked()))
        assert loss.has_happened.is_set()
        assert answers == expected
        assert cluster.door._flow.continuation.num_replays > 0
        assert victim.replica_id not in {peer.member.replica_id for peer in cluster.door.peers}
