"""The law of the house for prompts that decode computes itself: nothing about them is different but who
computes them."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from bench.workload import Reference, make_cases
from cluster.config.settings import ClusterArgs
from cluster.errors import ClusterError
from cluster.ids import new_request_id
from cluster.scheduling.budget import StepBudget
from cluster.types.messages import FinishReason
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.fakes.progress import Progress
from tests.fakes.slow_params import often
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_law import MAX_TOKENS, MODEL, check_all, cluster_args
from tests.flow.text_models import (
    BLOCK_SIZE,
    GREEDY,
    WINDOW,
    answers,
    draw_prompts,
    generated,
    save_mistral,
)  # fmt: skip

NUM_TOKENS, STRETCH = 40, 20
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 24, 33, 64, 150)
SAMPLED = SamplingParams(temperature=1.5, top_p=0.95, seed=5)


@pytest.fixture(scope="module", params=["whole", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mistral(tmp_path_factory.mktemp(request.param), WINDOW if request.param == "window" else None)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return draw_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return generated(folder, prompts, NUM_TOKENS)


def folder_args(folder: Path, decode: dict[str, Any] | None = None, **changes: Any) -> ClusterArgs:
    args = cluster_args(24).model_copy(update={"model": str(folder), "block_size": BLOCK_SIZE, **changes})
    return args.model_copy(update={"decode": type(args.decode).model_validate(decode or {"kv_blocks": 512})})


def cut_stretches(cluster: LocalCluster) -> None:
    """Prompts of more than `STRETCH` tokens take several."""
    for decode in cluster.decodes:
        decode.engine.planner.budget = StepBudget(10.0, BLOCK_SIZE, STRETCH)


ALL, EVERY_OTHER = (lambda _: True), (lambda number: number % 2)  # which prompts decode computes
ALWAYS = (("off", 1, ALL), ("off", 2, EVERY_OTHER), ("ngram", 2, ALL), ("draft", 1, EVERY_OTHER))
WAYS = list(itertools.product(("off", "ngram", "draft"), (1, 2), (ALL, EVERY_OTHER)))


@pytest.mark.parametrize(("speculation", "num_choices", "prefills_locally"), often(WAYS, ALWAYS))
async def test_prompts_that_decode_computes_are_answered_like_generate(
    folder, prompts, expected, speculation, num_choices, prefills_locally
):
    method = {"method": speculation} | ({"model": str(folder)} if speculation == "draft" else {})
    args = folder_args(folder, {"kv_blocks": 512, "speculation": method})
    async with local_cluster(args, (0, 1, 1)) as cluster:
        cut_stretches(cluster)
        policy = cluster.let_prefill_locally(prefills_locally)
        got = await asyncio.gather(
            *(answers(cluster, p, NUM_TOKENS, num_choices=num_choices) for p in prompts)
        )
        assert policy.num_local >= len(prompts) // 2
    assert got == [[answer] * num_choices for answer in expected]


async def test_prompts_that_are_preempted_and_computed_here_again_are_answered_like_generate(
    folder, prompts, expected
):
    async with local_cluster(
        let_all_in(folder_args(folder, {"kv_blocks": 26})), (0, 1, 1), overcommits=2 * len(prompts)
    ) as cluster:
        cut_stretches(cluster)
        cluster.let_prefill_locally()
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts * 2))
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0
    assert got == [[answer] for answer in expected] * 2


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "int8"}], ids=["plain", "int8"])
async def test_a_seed_draws_what_it_draws_where_prefill_computes_the_prompt(folder, prompts, changes):
    """Also over int8 KV, of which prefill and decode see the same codes."""
    async with local_cluster(folder_args(folder, **changes), (0, 1, 1)) as cluster:
        cut_stretches(cluster)
        cluster.let_prefill_locally(lambda _: False)
        moved = await asyncio.gather(
            *(answers(cluster, prompt, NUM_TOKENS, SAMPLED, 2) for prompt in prompts)
        )
        cluster.let_prefill_locally()
        stayed = await asyncio.gather(
            *(answers(cluster, prompt, NUM_TOKENS, SAMPLED, 2) for prompt in prompts)
        )
    assert stayed == moved


async def test_texts_that_stay_among_media_that_move_are_answered_like_generate():
    reference = Reference(MODEL)
    expected = [(case, reference.answer(case, MAX_TOKENS)) for case in make_cases(13, 18)]
    async with local_cluster(cluster_args(48, "nixl"), (1, 1, 2)) as cluster:
        policy = cluster.let_prefill_locally()
        await check_all(cluster, expected, 16)
        assert 0 < policy.num_local == policy.num_able < len(expected)


async def test_min_tokens_and_stop_tokens_hold_from_the_first_token_on(folder, prompts, expected):
    """Prefill's first tokens are the measure."""
    first = expected[3][0]
    no_token = 2_000_000_000  # of any vocabulary
    stops = [StopParams(6, (first,)), StopParams(6, (no_token, first), min_tokens=1), StopParams(1)]
    got = []
    async with local_cluster(folder_args(folder), (0, 1, 1)) as cluster:
        for prefills_locally in (False, True):
            cluster.let_prefill_locally(lambda _, local=prefills_locally: local)
            for stop in stops:
                request = GenerateRequest(new_request_id(), Prompt(prompts[3]), (GREEDY,), stop)
                (stream,) = cluster.door.dispatcher.generate(
                    ClientRequest(request, (), (), RequestTimeline(0.0))
                )
                events = [event async for event in stream]
                got.append(([t for e in events for t in e.token_ids], events[-1].finish_reason))
    assert got[:3] == got[3:]
    assert got[0] == ([first], FinishReason.STOP) and first not in got[1][0][:1]


async def test_the_first_token_tells_how_long_the_prompt_took(folder, prompts):
    async with local_cluster(folder_args(folder), (0, 1, 1)) as cluster:
        cut_stretches(cluster)
        cluster.let_prefill_locally()
        request = GenerateRequest(new_request_id(), Prompt(prompts[-1]), (GREEDY,), StopParams(3))
        started_at = asyncio.get_running_loop().time()
        (stream,) = cluster.door.dispatcher.generate(ClientRequest(request, (), (), RequestTimeline(0.0)))
        first, *others = [event async for event in stream]
        passed_s = asyncio.get_running_loop().time() - started_at
        curve = cluster.decodes[0].engine.planner.budget.fit.curve()
    assert first.timing is not None and all(event.timing is None for event in others)
    assert first.timing.media_s == 0 and first.timing.computing_s > 0
    assert first.timing.blocks_s + first.timing.queued_s + first.timing.computing_s < passed_s
    assert curve is not None and curve.seconds(100) > 0


async def test_clients_that_leave_while_decode_computes_their_prompts_leave_nothing_behind(folder, prompts):
    rng, progress = random.Random(5), Progress()

    async def one(cluster: LocalCluster, prompt: tuple[int, ...]) -> bool:
        async def read() -> None:
            num_choices = rng.choice([1, 2])
            got = await answers(
                cluster, prompt, NUM_TOKENS, num_choices=num_choices, on_event=progress.happens
            )
            assert [len(answer) for answer in got] == [NUM_TOKENS] * num_choices

        return await progress.leave_after(rng.choice([rng.randrange(400), None]), read())

    async with local_cluster(folder_args(folder, {"kv_blocks": 40}), (0, 1, 1)) as cluster:
        cut_stretches(cluster)
        cluster.let_prefill_locally(lambda number: number % 4 > 0)
        have_finished = await asyncio.gather(*(one(cluster, prompt) for prompt in prompts * 4))
    assert have_finished.count(False) > 5 and have_finished.count(True) > 5


async def test_a_prompt_that_decode_cannot_hold_is_refused_by_name(folder):
    async with local_cluster(folder_args(folder, {"kv_blocks": 8}), (0, 1, 1)) as cluster:
        cluster.let_prefill_locally()
        with pytest.raises(ClusterError, match="tokens of KV cache; a decode worker holds 64"):
            await answers(cluster, tuple(range(5, 100)), NUM_TOKENS)
