"""Requests that show one image at the same time share its embeddings in prefill, whatever becomes of the one
that brought them.

Encoders are held at the door of their thread pool, so that all requests are in work before the first
embedding is there.
"""

from __future__ import annotations

import asyncio
import io
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.workload import Answer, Case, Reference, data_uri, make_case
from cluster.engine.features import FeatureStore
from cluster.errors import MediaError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from encoder_service.service import NUM_PREPARE_THREADS
from kv_transfer.agents.factory import _LOCAL_NETWORK as network
from kv_transfer.agents.in_process import FaultScript
from router.flow.state import Attempt
from tests.flow.local_cluster import HANG_S, PATIENCE_S, LocalCluster, local_cluster
from tests.flow.test_law import cluster_args

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
MAX_TOKENS = 12
OPENINGS = ("Look.", "What is this?", "Tell me:", "Here is a picture.", "Now answer", "Describe it.")
Expected = tuple[Case, Answer]


@pytest.fixture(scope="module")
def expected() -> list[Expected]:
    """One image behind different openings: no prompt is the prefix of another."""
    case = make_case(random.Random(31), "image")
    (message,) = case.messages
    reference = Reference(MODEL)
    pairs = []
    for opening in OPENINGS:
        content = [{"type": "text", "text": opening}, *message["content"]]
        asked = replace(case, messages=[{"role": "user", "content": content}])
        pairs.append((asked, reference.answer(asked, MAX_TOKENS)))
    return pairs


@contextmanager
def held(cluster: LocalCluster) -> Iterator[threading.Event]:
    """Nothing is decoded, and so nothing encoded, until the event is set."""
    is_free = threading.Event()
    for encoder in cluster.encoders:
        for _ in range(NUM_PREPARE_THREADS):
            encoder.encoder.executor.submit(is_free.wait)
    try:
        yield is_free
    finally:
        is_free.set()


@asynccontextmanager
async def asked(
    cluster: LocalCluster, pairs: list[Expected]
) -> AsyncIterator[list[asyncio.Task[tuple[str, int]]]]:
    """All of them at once, the first one first; entered when everybody knows who shares."""
    tasks: list[asyncio.Task[tuple[str, int]]] = []
    for case, _ in pairs:
        tasks.append(asyncio.ensure_future(cluster.answer(case, MAX_TOKENS)))
        async with asyncio.timeout(HANG_S):
            while len(cluster.prefills[0].features.copies) < len(tasks):
                await asyncio.sleep(0.002)
    async with asyncio.timeout(HANG_S):
        while sum(len(encoder.encoder.engine.deliveries) for encoder in cluster.encoders) > 1:
            await asyncio.sleep(0.002)
    try:
        yield tasks
    finally:
        await asyncio.wait(tasks, timeout=HANG_S)


def right(pairs: list[Expected]) -> list[tuple[str, int]]:
    return [(answer.text, len(answer.token_ids)) for _, answer in pairs]


def attempts(cluster: LocalCluster) -> list[Attempt]:
    return list(cluster.door.dispatcher.flow.attempts.values())


def num_bytes(cluster: LocalCluster, num_blocks: int) -> int:
    return num_blocks * cluster.encoders[0].encoder.memory.layout.block_bytes


def sent_bytes(cluster: LocalCluster) -> int:
    return sum(encoder.process.transfer_engine.sent.raw_bytes for encoder in cluster.encoders)


@pytest.mark.parametrize(("transport", "num_encoders"), [("in_process", 1), ("nixl", 2)])
async def test_one_image_of_many_requests_is_encoded_kept_and_sent_once(expected, transport, num_encoders):
    async with local_cluster(cluster_args(64, transport), (num_encoders, 1, 1)) as cluster:
        features = cluster.prefills[0].features
        with held(cluster) as is_free:
            async with asked(cluster, expected) as tasks:
                assert features.num_open_leases == 1
                num_blocks = features.num_used_blocks
                is_free.set()
        assert [task.result() for task in tasks] == right(expected)
        assert sent_bytes(cluster) == num_bytes(cluster, num_blocks)
        await cluster.audit()
        assert (
            sum(encoder.encoder.engine.load().num_cached_blocks for encoder in cluster.encoders) == num_blocks
        )


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("when", ["while it is decoded", "while it is encoded or sent"])
async def test_the_others_are_answered_when_the_one_that_brings_the_image_is_cancelled(
    expected, when, has_room, monkeypatch
):
    """Whether or not there is room for another copy while the first is given up."""
    pools: dict[FeatureStore, BlockPool] = {}

    def feature_store(memory: BlockMemory, blocks: BlockPool, transfer_engine: Any) -> FeatureStore:
        store = FeatureStore(memory, blocks, transfer_engine)
        pools[store] = blocks
        return store

    monkeypatch.setattr("cluster.engine.worker.FeatureStore", feature_store)
    async with local_cluster(cluster_args(64)) as cluster:
        blocks = pools[cluster.prefills[0].features]
        with held(cluster) as is_free:
            async with asked(cluster, expected) as tasks:
                taken = blocks.allocate(0 if has_room else blocks.num_free)
                if when != "while it is decoded":
                    is_free.set()
                    await asyncio.sleep(0.003)
                tasks[0].cancel()
                await asyncio.sleep(0.02)
                blocks.free(taken)
                is_free.set()
        assert [task.result() for task in tasks[1:]] == right(expected)[1:]


async def test_a_transfer_that_fails_costs_no_request_and_the_next_brings_the_image(expected, clocks):
    async with local_cluster(cluster_args(64)) as cluster:
        with held(cluster) as is_free:
            async with asked(cluster, expected) as tasks:
                network.faults = FaultScript()
                network.faults.fail("post", 1)
                is_free.set()
        network.faults = FaultScript()
        assert [task.result() for task in tasks] == right(expected)
        clocks.leap(2 * PATIENCE_S)  # only its time ends a failed lease


async def test_a_bad_image_of_many_requests_is_named_to_each_of_them(expected):
    good, _ = expected[0]
    opening, _, question = good.messages[0]["content"]
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(file, "JPEG")
    url = data_uri("image/jpeg", file.getvalue()[:-200])  # the header is whole, the door is content
    truncated = {"type": "image_url", "image_url": {"url": url}}
    bad = replace(good, messages=[{"role": "user", "content": [opening, truncated, question]}])
    async with local_cluster(cluster_args(64)) as cluster:
        with held(cluster) as is_free:
            async with asked(cluster, [(bad, expected[0][1])] * 4) as tasks:
                is_free.set()
    for task in tasks:
        assert isinstance(task.exception(), MediaError) and "item 0" in str(task.exception())


async def test_a_lost_encoder_that_was_to_bring_the_image_costs_nobody_anything(expected, clocks):
    async with local_cluster(cluster_args(64), (2, 1, 1)) as cluster:
        with held(cluster) as is_free:
            async with asked(cluster, expected) as tasks:
                owner = max(cluster.encoders, key=lambda encoder: len(encoder.encoder.engine.deliveries))
                assert len({attempt.media[0].encoder for attempt in attempts(cluster)}) == 1
                await owner.stop()
                is_free.set()
        assert [task.result() for task in tasks] == right(expected)
        clocks.leap(2 * PATIENCE_S)
