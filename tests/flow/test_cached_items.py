"""Items whose tokens are in the prefix cache of the worker that computes the prompt: they are neither encoded
nor sent, and a door that expects too much of a cache costs time only. The audit stands in `local_cluster`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.workload import Answer, Case, Reference, make_case
from router.flow.placer import Placer
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_law import MODEL, cluster_args

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def turns() -> list[tuple[Case, Answer]]:
    """A question about an image, with text behind it that fills its last block, and the next question."""
    reference, case = Reference(MODEL), make_case(random.Random(31), "image")
    (message,) = case.messages
    content = [*message["content"], {"type": "text", "text": "Look at it closely, and then answer. " * 2}]
    case = replace(case, messages=[{"role": "user", "content": content}])
    first = reference.answer(case, MAX_TOKENS)
    question = {"role": "user", "content": "And what is beside it?"}
    answer = {"role": "assistant", "content": first.text}
    second = replace(case, messages=[*case.messages, answer, question])
    return [(case, first), (second, reference.answer(second, MAX_TOKENS))]


def right(answer: Answer) -> tuple[str, int]:
    return answer.text, len(answer.token_ids)


def num_asked(cluster: LocalCluster) -> tuple[int, int]:
    """Items that encoders were asked for, and bytes of embeddings that they have sent."""
    encoders = cluster.encoders or [whole._encoder for whole in cluster.decodes]
    engines = [getattr(encoder, "engine", None) or encoder._engine for encoder in encoders]
    totals = [engine.load().encoded for engine in engines]
    processes = [worker._process for worker in cluster.encoders]
    sent = sum(process.transfer_engine.sent.raw_bytes for process in processes)
    return sum(each.num_encoded + each.num_cached for each in totals), sent


async def test_an_item_in_the_prefix_cache_is_neither_encoded_nor_sent(turns):
    """In EPD, too: see test_whole."""
    async with local_cluster(cluster_args(48)) as cluster:
        (case, answer), second = turns
        assert await cluster.answer(case, MAX_TOKENS) == right(answer)
        before = num_asked(cluster)
        assert before[0] == 1 and before[1] > 0
        for case, answer in (second, second):
            assert await cluster.answer(case, MAX_TOKENS) == right(answer)
        assert num_asked(cluster) == before


@pytest.mark.parametrize(
    "num_replicas", [pytest.param((1, 1, 1), id="E/P/D"), pytest.param((0, 0, 0, 0, 0, 1), id="EPD")]
)
async def test_an_item_that_is_not_cached_as_the_door_expected_is_encoded(turns, num_replicas, monkeypatch):
    monkeypatch.setattr(Placer, "cached_items", lambda _, view, __: tuple(range(len(view.media))))
    async with local_cluster(cluster_args(48), num_replicas) as cluster:
        for case, answer in turns:
            assert await cluster.answer(case, MAX_TOKENS) == right(answer)
        assert num_asked(cluster)[0] == 1
