"""The law where the next forward is enqueued before tokens are read, as on a GPU. Here the CPU computes it at
once, from the tokens that the host has not read."""

from __future__ import annotations

import asyncio

import pytest

from bench.workload import Answer, Case, Reference, make_cases
from cluster.engine.ahead import ForwardAhead
from tests.flow.local_cluster import local_cluster
from tests.flow.losses import Loss, StandIns
from tests.flow.test_law import MAX_TOKENS, MODEL, check_all, cluster_args
from tests.flow.test_worker_loss import answer, asked
from tests.flow.test_worker_loss import expected as undisturbed  # noqa: F401


@pytest.fixture(autouse=True)
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every worker runs ahead. Returns how many choices each forward ahead computes."""
    numbers: list[int] = []
    plan = ForwardAhead.plan

    def counted(self, batch, *, is_alone):
        choices = plan(self, batch, is_alone=is_alone)
        numbers.append(len(choices))
        return choices

    monkeypatch.setattr(ForwardAhead, "plan", counted)
    monkeypatch.setattr("cluster.engine.worker.may_run_ahead", lambda device: True)
    return numbers


@pytest.fixture(scope="module")
def expected() -> list[tuple[Case, Answer]]:
    reference = Reference(MODEL)
    return [(case, reference.answer(case, MAX_TOKENS)) for case in make_cases(5, 12)]


@pytest.mark.parametrize(
    "num_replicas",
    [
        pytest.param((1, 1, 1), id="e-p-d"),
        pytest.param((0, 0, 0, 0, 0, 1), id="whole", marks=pytest.mark.slow),
    ],
)
async def test_answers_equal_generate(expected, num_ahead, num_replicas):
    async with local_cluster(cluster_args(48), num_replicas) as cluster:
        await check_all(cluster, expected, 8)
    assert any(num_ahead)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_lost_worker_costs_no_token(stand_ins: StandIns, undisturbed, num_ahead, role):  # noqa: F811
    """Choices that are drawn, and guidance, too. The answers they are compared with did not run ahead."""
    async with local_cluster(cluster_args(64), (1, 2, 2)) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        loss = Loss(cluster.prefills if role == "prefill" else cluster.decodes, "run", 4, stand_ins)
        answers = await asyncio.gather(*(answer(cluster, case, fields) for case, fields in asked()))
        assert loss.victim is not None and answers == undisturbed
    assert any(num_ahead)
