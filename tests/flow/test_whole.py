"""Workers that encode and compute prompts: what they encode for their own prompts stays in the process, and
goes elsewhere only when something fails. The audit stands in `local_cluster`."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from bench.workload import Answer, Case, Reference, make_cases
from cluster.engine.features import FeatureStore
from cluster.engine.worker import LanguageWorker
from encoder_service.service import NUM_PREPARE_THREADS
from kv_transfer.lease.receiver import Receiver
from kv_transfer.lease.sender import Sender
from router.flow import watch
from router.policy import ClusterView, Decision, JointPolicy, RequestView
from tests.flow.local_cluster import HANG_S, LocalCluster, local_cluster, with_policy
from tests.flow.test_law import MODEL, cluster_args

MAX_TOKENS = 8
ONE, TWO = (0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 2)


@pytest.fixture(scope="module")
def answered() -> list[tuple[Case, Answer]]:
    """One case with an item of each kind, and text."""
    reference = Reference(MODEL)
    by_kind = {case.kind: case for case in make_cases(41, 40)}
    return [(case, reference.answer(case, MAX_TOKENS)) for case in by_kind.values()]


@pytest.fixture
def image(answered) -> tuple[Case, Answer]:
    return next(pair for pair in answered if pair[0].kind == "image")


@pytest.fixture
def leases(monkeypatch) -> list[str]:
    """Every grant that is made, and what becomes of it."""
    made: list[str] = []

    def watch(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            made.append(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(Receiver, "grant")
    watch(Sender, "open")
    watch(FeatureStore, "fill_here")
    return made


def right(answer: Answer) -> tuple[str, int]:
    return answer.text, len(answer.token_ids)


class AtFirst(JointPolicy):
    """Of the first placement: items are encoded at this worker, and all else is done by the first one."""

    encoder = 0

    def __init__(self):
        super().__init__()
        self._has_placed = False

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        names = sorted(cluster.encoders.slots)
        decision = super().decide(request, cluster, now)
        if self._has_placed:
            return decision
        self._has_placed = True
        encoders = (names[self.encoder],) * len(request.media)
        where = replace(decision.placement, encoders=encoders, prefill=names[0], decode=names[0])
        return replace(decision, placement=where)


class EncodedAtSecond(AtFirst):
    encoder = 1


def encoded(cluster: LocalCluster) -> list[int]:
    return [encoder_of(whole).engine.load().encoded.num_encoded for whole in cluster.decodes]


def encoder_of(whole: LanguageWorker) -> Any:
    return whole.encoder


async def test_nothing_is_leased_or_sent_while_one_worker_does_all_of_a_request(answered, leases):
    async with local_cluster(cluster_args(48), ONE) as cluster:
        for _ in range(2):
            for case, answer in answered:
                assert await cluster.answer(case, MAX_TOKENS) == right(answer), case.kind
        assert leases == []
        (whole,) = cluster.decodes
        totals = encoder_of(whole).engine.load().encoded
        assert totals.num_encoded > totals.num_cached == 0  # the second time the prefix cache has all of it
        metrics = cluster.door.metrics().decode()
    for pool in ("encode", "whole"):
        assert f'epdg_worker_running{{pool="{pool}",replica="{whole.replica_id}"}} 0.0' in metrics


@pytest.mark.parametrize("encoder", [0, 1])  # of the two, the prompt is computed at the first
async def test_an_item_that_fails_at_one_worker_is_encoded_at_the_other(image, leases, encoder):
    """It travels only if that is not the worker that computes the prompt."""
    case, answer = image

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    policy = (AtFirst, EncodedAtSecond)[encoder]
    async with local_cluster(with_policy(cluster_args(48), policy), TWO) as cluster:
        encoder_of(cluster.decodes[encoder]).engine.runner.prepare = fail
        assert await cluster.answer(case, MAX_TOKENS) == right(answer)
        assert encoded(cluster)[1 - encoder] == 1
        sent = [whole.process.feature_transfer_engine.sent.raw_bytes for whole in cluster.decodes]
        assert sent[0] == 0 and (sent[1] > 0) == (encoder == 0)
        assert ("fill_here" in leases) == (encoder == 1)


async def test_what_a_worker_has_whose_encoder_hangs_goes_on_at_the_other(image, monkeypatch):
    monkeypatch.setattr(watch, "MOVE_S", 0.1)
    case, answer = image
    async with local_cluster(with_policy(cluster_args(48), AtFirst), TWO) as cluster:
        engine, is_free = encoder_of(cluster.decodes[0]).engine, threading.Event()
        step = engine.step
        engine.step = lambda: step() if is_free.wait() else 0.0
        try:
            assert await cluster.answer(case, MAX_TOKENS) == right(answer)
            assert encoded(cluster)[1] == 1
        finally:
            is_free.set()


async def test_of_two_requests_with_one_image_the_first_may_leave(image):
    case, answer = image
    async with local_cluster(cluster_args(48), ONE) as cluster:
        (whole,) = cluster.decodes
        is_free = threading.Event()
        for _ in range(NUM_PREPARE_THREADS):
            encoder_of(whole).executor.submit(is_free.wait)
        asked = []
        async with asyncio.timeout(HANG_S):
            for num_waiting in (1, 2):
                asked.append(asyncio.ensure_future(cluster.answer(case, MAX_TOKENS)))
                while len(requests_with_items(whole)) < num_waiting:
                    await asyncio.sleep(0.002)
            asked[0].cancel()
            while len(requests_with_items(whole)) > 1:
                await asyncio.sleep(0.002)
            is_free.set()
            assert await asked[1] == right(answer)
        await cluster.audit()
        assert whole.features.num_used_blocks == 0 and asked[0].cancelled()


def requests_with_items(whole: LanguageWorker) -> set[str]:
    assert whole.features is not None
    return {request_id for request_id, _ in whole.features.copies}
