"""A worker's process dies while it works for many requests. What it had goes on elsewhere, and clients
notice a pause at most. What other workers had granted it is free long before the leases are over."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bench.workload import Case, Reference, make_cases
from router.api.app import build_api
from router.generation import Choice
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.losses import Loss, StandIns
from tests.flow.test_cancel import call_for
from tests.flow.test_law import MAX_TOKENS, MODEL, ask, cluster_args

NUM_CASES = 12  # each kind twice, each time with the same of FIELDS


@pytest.fixture(autouse=True)
def _little_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one process nothing is: what a lost worker had been granted is free at once, and not after two
    seconds."""
    monkeypatch.setattr("kv_transfer.lease.receiver.IN_FLIGHT_S", 0.1)


def peers_of(cluster: LocalCluster, role: str) -> list:
    return [peer for peer in cluster.door.peers if peer.member.role == role]


async def test_the_items_of_an_encoder_that_dies_are_encoded_elsewhere(stand_ins: StandIns):
    reference = Reference(MODEL)
    cases = [case for case in make_cases(23, 2 * NUM_CASES) if case.kind != "text"][:NUM_CASES]
    expected = [reference.answer(case, MAX_TOKENS).text for case in cases]
    async with local_cluster(cluster_args(64), (2, 1, 1)) as cluster:
        loss = Loss(cluster.encoders, "encode", 2, stand_ins)
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            answers = await asyncio.gather(*(ask(client, case) for case in cases))
        assert loss.victim is not None
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
    ("role", "num_replicas"),
    [
        pytest.param("prefill", (1, 2, 1), id="prefill"),
        pytest.param("prefill", (1, 1, 1), id="the only prefill"),
        pytest.param("decode", (1, 1, 2), id="decode"),
        pytest.param("language", (1, 0, 0, 2), id="language"),
        pytest.param("whole", (0, 0, 0, 0, 0, 2), id="whole"),
    ],
)
async def test_what_a_lost_worker_had_goes_on_at_another(stand_ins, role, num_replicas, expected):
    """Every kind of media, several choices that are drawn, and guidance: the tokens are those without a loss.
    If there is no other worker that prefills, decode computes the prompts of its answers.
    What others had granted the worker is free soon: the audit of `local_cluster` waits for a sixth of a
    lease's time."""
    async with local_cluster(cluster_args(64), num_replicas) as cluster:
        if num_replicas[1:] in ((2, 1), (1, 2)):
            cluster.let_prefill_locally(lambda _: False)  # text, too, is to travel
        workers = cluster.prefills if role == "prefill" else cluster.decodes
        loss = Loss(workers, "run", 4, stand_ins)
        answers = await asyncio.gather(*(answer(cluster, case, fields) for case, fields in asked()))
        assert loss.victim is not None
        assert answers == expected
        assert cluster.door.dispatcher.flow.continuation.num_replays > 0
        assert loss.victim.replica_id not in {peer.member.replica_id for peer in cluster.door.peers}
