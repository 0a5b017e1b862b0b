"""Items whose tokens are in the prefix cache of the worker that computes the prompt: they are neither encoded
nor sent, and the worker that generated the last answer computes the next turn. A door that expects too much
of a cache costs time only. The audit stands in `local_cluster`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from bench.workload import Answer, Case, Reference, make_case
from router.flow.placer import Placer
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_law import MODEL, cluster_args

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def turns() -> list[tuple[Case, Answer]]:
    """A question about an image, with text behind it that fills its last block, and the next questions."""
    reference, case = Reference(MODEL), make_case(random.Random(31), "image")
    (message,) = case.messages
    content = [*message["content"], {"type": "text", "text": "Look at it closely, and then answer. " * 2}]
    case = replace(case, messages=[{"role": "user", "content": content}])
    answered = [(case, reference.answer(case, MAX_TOKENS))]
    for question in ("And what is beside it?", "Which of them is larger?"):
        answer = {"role": "assistant", "content": answered[-1][1].text}
        messages = [*case.messages, answer, {"role": "user", "content": question}]
        case = replace(case, messages=messages)
        answered.append((case, reference.answer(case, MAX_TOKENS)))
    return answered


def right(answer: Answer) -> tuple[str, int]:
    return answer.text, len(answer.token_ids)


def num_asked(cluster: LocalCluster) -> tuple[int, int]:
    """Items that encoders were asked for, and bytes of embeddings that they have sent."""
    encoders: list[Any] = [worker.encoder for worker in cluster.encoders or cluster.decodes]
    totals = [encoder.engine.load().encoded for encoder in encoders]
    sent = sum(worker.process.transfer_engine.sent.raw_bytes for worker in cluster.encoders)
    return sum(each.num_encoded + each.num_cached for each in totals), sent


async def test_an_item_in_the_prefix_cache_is_neither_encoded_nor_sent(turns):
    """In EPD, too: see test_whole."""
    async with local_cluster(cluster_args(48)) as cluster:
        (case, answer), second, _ = turns
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


async def test_later_turns_are_answered_by_the_decode_worker_alone(turns):
    async with local_cluster(cluster_args(48)) as cluster:
        cluster.let_prefill_locally()
        asked = asked_of(cluster)
        for number, (case, answer) in enumerate(turns):
            assert await cluster.answer(case, MAX_TOKENS) == right(answer)
            kv_bytes = cluster.prefills[0].process.kv_transfer_engine.sent.raw_bytes
            if number == 0:
                before = (*num_asked(cluster), kv_bytes)
        assert (*num_asked(cluster), kv_bytes) == before and kv_bytes > 0
        assert asked == ["prefill", "decode", "decode", "decode"], "only the first prompt was computed there"


@pytest.mark.parametrize("shows_another", [False, True])
async def test_a_turn_with_media_that_decode_lacks_is_computed_there_behind_what_it_has(turns, shows_another):
    """Either the blocks go while the request is on its way, or its question shows an image of its own."""
    async with local_cluster(cluster_args(48)) as cluster:
        cluster.let_prefill_locally()
        asked = asked_of(cluster)
        (case, answer), second, _ = turns
        assert await cluster.answer(case, MAX_TOKENS) == right(answer)
        before = num_asked(cluster)[0]
        if shows_another:
            new, said = make_case(random.Random(32), "image"), {"role": "assistant", "content": answer.text}
            messages, images = [*case.messages, said, *new.messages], (*case.images, *new.images)
            case = replace(case, messages=messages, images=images)
            second = case, Reference(MODEL).answer(case, MAX_TOKENS)
        else:
            engine = cluster.decodes[0].engine
            start = engine.start

            def evict(door, message, came_at):
                engine.blocks.forget_all()
                start(door, message, came_at)

            engine.start = evict
        assert await cluster.answer(second[0], MAX_TOKENS) == right(second[1])
        assert asked == ["prefill", "decode", "decode"]
        assert num_asked(cluster)[0] == before + 1
        assert not any(worker.is_avoided for worker in cluster.door.dispatcher.flow.workers)


def asked_of(cluster: LocalCluster) -> list[str]:
    """The language workers that are asked for a request, from now on."""
    asked: list[str] = []
    for role, worker in (("prefill", cluster.prefills[0]), ("decode", cluster.decodes[0])):

        def start(door, message, came_at, role=role, start=worker.engine.start):
            asked.append(role)
            start(door, message, came_at)

        worker.engine.start = start
    return asked
