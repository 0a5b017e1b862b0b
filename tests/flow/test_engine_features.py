"""The law of the house with the engine's features on: preemption, several choices, guidance, speculation,
priorities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
import transformers as hf

from bench.workload import Answer, Case, Reference, make_cases
from cluster.config.settings import ClusterArgs
from cluster.ids import new_request_id
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from router.api.app import build_api
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_law import MODEL, cluster_args
from tests.flow.text_models import SIZES, save_text_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_TOKENS = 24
NEGATIVE = "Say three numbers."


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(12, 24)


@pytest.fixture(scope="module")
def expected(reference: Reference, cases: list[Case]) -> list[Answer]:
    return reference.answers(cases, MAX_TOKENS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _plain() -> AsyncIterator[LocalCluster]:
    async with local_cluster(cluster_args(48)) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def plain(_plain: LocalCluster) -> AsyncIterator[LocalCluster]:
    """A cluster with memory for all, which the tests of this file share: what each answers alone is the
    measure."""
    yield _plain
    await _plain.audit()
    assert _plain.decodes[0].engine.load().totals.num_preempted == 0


def with_decode(args: ClusterArgs, **decode: Any) -> ClusterArgs:
    return args.model_copy(update={"decode": type(args.decode).model_validate(decode)})


async def choices(cluster: LocalCluster, case: Case, **fields: object) -> list[str]:
    """Texts of all choices."""
    transport = httpx.ASGITransport(build_api(cluster.door))
    body = {"model": "demo", "messages": case.messages, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["message"]["content"] for choice in response.json()["choices"]]


async def test_answers_that_were_preempted_equal_generate(plain, cases, expected):
    """Prompts of one to six blocks, and answers of four that go on after `generate`'s last token: any two
    prompts fit into 14 blocks. In whatever order they come to the door, those that are admitted together
    outgrow the pool: what they leave is less than the next prompt with a block for each answer."""
    args, cases, expected = cluster_args(48), cases[:12], expected[:12]
    fields = {"ignore_eos": True, "max_tokens": 4 * args.block_size}
    alone = await asyncio.gather(*(choices(plain, case, **fields) for case in cases))
    assert all(texts[0].startswith(answer.text) for texts, answer in zip(alone, expected, strict=True))
    args = let_all_in(with_decode(args, kv_blocks=14))
    async with local_cluster(args, overcommits=len(cases)) as cluster:
        got = await asyncio.gather(*(choices(cluster, case, **fields) for case in cases))
        assert got == alone
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0


async def test_several_choices_equal_generate_and_each_other(plain, cases, expected):
    got = await asyncio.gather(*(choices(plain, case, n=3) for case in cases[:12]))
    assert got == [[answer.text] * 3 for answer in expected[:12]]


async def test_choices_draw_what_they_would_draw_alone_also_after_a_preemption(plain, cases):
    sampled = {"temperature": 2.0, "seed": 3, "ignore_eos": True}
    together = [await choices(plain, case, n=2, **sampled) for case in cases[:5]]
    first = [await choices(plain, case, **sampled) for case in cases[:5]]
    assert [texts[0] for texts in together] == [texts[0] for texts in first]
    assert any(texts[0] != texts[1] for texts in together)
    async with local_cluster(
        let_all_in(with_decode(cluster_args(48), kv_blocks=13)), overcommits=5
    ) as cluster:
        crowded = await asyncio.gather(*(choices(cluster, case, n=2, **sampled) for case in cases[:5]))
        assert crowded == together
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2: transformers' guided `generate` runs on text models."""
    return save_text_model(tmp_path_factory.mktemp("text-model"), hf.Qwen2Config(**SIZES), seed=4)


@pytest.mark.parametrize("num_negative_tokens", [0, 1, 23])
async def test_guided_tokens_equal_transformers_guided_generate(text_model, num_negative_tokens):
    """0: no negative prompt, then the companion starts from the prompt's last token."""
    model: Any = hf.Qwen2ForCausalLM.from_pretrained(text_model, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(num_negative_tokens)
    args = cluster_args(16).model_copy(update={"model": str(text_model)})
    async with local_cluster(args, (0, 1, 1)) as cluster:
        for length in (1, 16, 37):
            ids = torch.randint(5, 900, (1, length), generator=draw)
            negative = torch.randint(5, 900, (1, num_negative_tokens), generator=draw)
            with torch.inference_mode():
                wanted = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=MAX_TOKENS,
                    do_sample=False,
                    guidance_scale=1.8,
                    negative_prompt_ids=negative if num_negative_tokens else None,
                )[0, length:].tolist()
            companion = negative if num_negative_tokens else ids[:, -1:]
            guidance = Guidance(1.8, Prompt(tuple(companion[0].tolist())))
            request = GenerateRequest(
                new_request_id(),
                Prompt(tuple(ids[0].tolist())),
                (SamplingParams(),),
                StopParams(MAX_TOKENS),
                guidance,
            )
            (stream,) = cluster.door.dispatcher.generate(ClientRequest(request, (), (), RequestTimeline(0.0)))
            got = [token_id async for event in stream for token_id in event.token_ids]
            assert got == wanted


async def test_guided_media_answers_equal_two_full_forwards_per_token(plain, reference, cases):
    """transformers' guided `generate` fails on this family, so the reference is written out: both prompts are
    run from their first token for every token."""
    media = [case for case in cases if case.kind in ("image", "audio", "video")][:3]
    fields = {"guidance_scale": 1.6, "negative_prompt": NEGATIVE, "max_tokens": 10}
    got = await asyncio.gather(*(choices(plain, case, **fields) for case in media))
    wanted = [guided_forwards(reference, case, 1.6, negative_ids(reference), 10) for case in media]
    assert [answer[0] for answer in got] == wanted


async def test_guided_choices_that_were_preempted_do_not_change(plain, cases):
    """Prompts of one kind and long answers: several are in decode at once, however fast the machine is."""
    fields = {"guidance_scale": 1.6, "negative_prompt": NEGATIVE, "ignore_eos": True, "max_tokens": 48}
    pictures = [case for case in cases if case.kind in ("image", "two images")][:5]
    alone = [await choices(plain, case, **fields) for case in pictures]
    async with local_cluster(
        let_all_in(with_decode(cluster_args(48), kv_blocks=18)), overcommits=len(pictures)
    ) as cluster:
        crowded = await asyncio.gather(*(choices(cluster, case, **fields) for case in pictures))
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0
    assert crowded == alone


@pytest.mark.parametrize("sampled", [False, True])
async def test_speculation_changes_no_token(plain, cases, expected, sampled):
    fields = {"temperature": 1.2, "seed": 5, "n": 2} if sampled else {}
    cases = cases[:12] if sampled else cases  # few drafts fit greedy answers
    args = with_decode(
        cluster_args(48), kv_blocks=512, speculation={"method": "ngram", "num_speculative_tokens": 4}
    )
    async with local_cluster(args) as cluster:
        got = await asyncio.gather(*(choices(cluster, case, **fields) for case in cases))
        assert cluster.decodes[0].engine.load().totals.num_accepted > 0
    if sampled:
        wanted = await asyncio.gather(*(choices(plain, case, **fields) for case in cases))
    else:
        wanted = [[answer.text] for answer in expected]
    assert got == wanted


async def test_an_answer_is_at_least_min_tokens_long(plain, cases):
    short, longer = [
        await choices(plain, cases[0], min_tokens=min_tokens, max_tokens=20) for min_tokens in (0, 20)
    ]
    assert longer[0].startswith(short[0]) and len(longer[0]) > len(short[0])


def negative_ids(reference: Reference) -> torch.Tensor:
    case = Case("text", [{"role": "user", "content": NEGATIVE}])
    return reference.inputs(case)["input_ids"]


@torch.inference_mode()
def guided_forwards(
    reference: Reference, case: Case, scale: float, negative: torch.Tensor, max_tokens: int
) -> str:
    inputs, model = reference.inputs(case), reference.model
    eos = model.generation_config.eos_token_id
    answer = torch.empty(1, 0, dtype=torch.int64)
    for _ in range(max_tokens):
        ids = torch.cat([inputs["input_ids"], answer], dim=1)
        given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        logits = model(**given, use_cache=False).logits[0, -1].log_softmax(-1)
        other_ids = torch.cat([negative, answer], dim=1)
        other = model(input_ids=other_ids, attention_mask=torch.ones_like(other_ids), use_cache=False)
        companion = other.logits[0, -1].log_softmax(-1)
        token = (companion + scale * (logits - companion)).argmax()
        answer = torch.cat([answer, token.view(1, 1)], dim=1)
        if int(token) == eos:
            break
    return decode(reference, answer[0])


def decode(reference: Reference, token_ids: torch.Tensor) -> str:
    return reference.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
