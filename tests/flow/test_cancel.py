"""Whatever moment a client chooses to leave, every stage gives back what it holds. The audit stands in
`local_cluster`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from bench.workload import make_cases
from cluster.errors import ClusterError, MediaError, UnavailableError
from cluster.text.defaults import GenerationDefaults
from decode_service.calls import GenerationCalls
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ServedModels
from tests.fakes.progress import Progress
from tests.fakes.slow_params import often
from tests.flow.local_cluster import local_cluster
from tests.flow.test_law import cluster_args

NUM_CLIENTS = 48
LONGEST_STAY, LONGEST_PAUSE = 400, 40  # events of all answers: of a client that leaves; between two arrivals
MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"


def call_for(case, **fields):
    body = {"model": "demo", "messages": case.messages, "max_tokens": 64, "temperature": 0, **fields}
    return chat_call(
        ChatRequest.model_validate(body), CallContext(ServedModels("demo"), GenerationDefaults.load(MODEL))
    )


@pytest.mark.parametrize("transport", often(["in_process", "nixl"], ["nixl"]))
async def test_clients_that_leave_at_random_moments_leave_nothing_behind(transport):
    """Moments are counted in events of all answers, so that a slow machine sees the same ones."""
    rng, progress = random.Random(5), Progress()

    async def read(cluster, case) -> None:
        for choice in await cluster.door.chat(call_for(case, ignore_eos=True)):
            try:
                async for _ in choice:
                    progress.happens()
            finally:
                await asyncio.shield(choice.aclose())

    async with local_cluster(cluster_args(64, transport)) as cluster:
        tasks = []
        for case in make_cases(3, NUM_CLIENTS):
            after = rng.randrange(LONGEST_STAY) if rng.random() < 0.5 else None
            tasks.append(asyncio.ensure_future(progress.leave_after(after, read(cluster, case))))
            await asyncio.sleep(0)
            await progress.pass_by(rng.randrange(LONGEST_PAUSE))
        have_finished = await asyncio.gather(*tasks)
    assert len(have_finished) == NUM_CLIENTS
    assert have_finished.count(False) > 10 and have_finished.count(True) > 10


async def test_bad_media_is_named_and_harms_no_neighbour():
    good = make_cases(4, 2)[1]
    url = good.messages[0]["content"][0]["image_url"]["url"]
    truncated = url[: len(url) // 2 // 4 * 4]
    async with local_cluster(cluster_args(64)) as cluster:

        async def text(image_url: str) -> str:
            content = [
                {"type": "image_url", "image_url": {"url": image_url}},
                *good.messages[0]["content"][1:],
            ]
            body = {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0}
            call = chat_call(
                ChatRequest.model_validate(body),
                CallContext(ServedModels("demo"), GenerationDefaults.load(MODEL)),
            )
            (choice,) = await cluster.door.chat(call)
            try:
                return "".join([delta.text async for delta in choice])
            finally:
                await choice.aclose()

        results = await asyncio.gather(text(url), text(truncated), text(url), return_exceptions=True)
    assert isinstance(results[1], MediaError) and "item" in results[1].message
    assert results[0] == results[2] and isinstance(results[0], str)


async def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    case = make_cases(4, 1)[0]
    args = cluster_args(64).model_copy(
        update={"decode": cluster_args(64).decode.model_copy(update={"kv_blocks": 4})}
    )
    async with local_cluster(args) as cluster:
        (choice,) = await cluster.door.chat(call_for(case, max_tokens=200))
        with pytest.raises(ClusterError, match="a decode worker holds 64"):
            async for _ in choice:  # prefill's first token may come before decode's refusal
                pass
        await choice.aclose()


async def test_a_serve_call_whose_request_never_comes_ends_by_itself():
    with pytest.raises(UnavailableError, match="did not reach this worker"):
        await GenerationCalls(start_timeout_s=0.05).run("never sent")
