"""Adapters over HTTP: a client names one as its model. Answers equal those of PEFT's own model, among
requests of the base model and of other adapters; KV is shared among requests with one adapter alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft import PeftModel

from bench.workload import Answer, Case, Reference, make_cases
from cluster.config.settings import ClusterArgs
from router.api.app import build_api
from tests.flow.adapter_folders import ATTENTION, MLP, save_adapter
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_law import MAX_TOKENS, MODEL, ask, cluster_args

NUM_CASES = 8  # one of every kind, and some
ROLES = (("encode", "prefill", "decode"), ("encode", "language"), ("whole",))


class Adapted:
    """The demo model with two adapters, and what each answers."""

    def __init__(self, folder: Path):
        reference: Any = Reference(MODEL)
        self.cases = make_cases(23, NUM_CASES)
        self.answers: dict[str, list[Answer]] = {"demo": reference.answers(self.cases, MAX_TOKENS)}
        self.folders: dict[str, str] = {}
        base = reference.model
        options = {
            "plain": {"targets": ATTENTION + MLP, "r": 8, "lora_alpha": 4},
            "attention": {"targets": ("q_proj", "v_proj"), "r": 4, "lora_alpha": 4, "use_rslora": True},
        }
        for seed, (name, chosen) in enumerate(options.items()):
            path = save_adapter(base, folder / name, "language_model", seed, **chosen)
            reference.model = PeftModel.from_pretrained(base, path).eval()
            self.answers[name] = reference.answers(self.cases, MAX_TOKENS)
            reference.model.unload()
            self.folders[name] = str(path)

    def pairs(self) -> list[tuple[str, Case, Answer]]:
        """Every case for every model, models in turn."""
        return [
            (name, case, answers[i])
            for i, case in enumerate(self.cases)
            for name, answers in self.answers.items()
        ]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapters"))


@asynccontextmanager
async def serving(
    adapted: Adapted, roles: tuple[str, ...] = ROLES[0], **more: object
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    args = cluster_args(48).model_dump(exclude_unset=True) | {"adapters": adapted.folders, "roles": roles}
    async with local_cluster(ClusterArgs.model_validate(args | more)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            yield cluster, client


@pytest.mark.parametrize(
    "roles", [ROLES[0], *(pytest.param(roles, marks=pytest.mark.slow) for roles in ROLES[1:])]
)
async def test_answers_of_every_adapter_in_company_equal_peft(
    adapted: Adapted, roles: tuple[str, ...]
) -> None:
    assert len({str([answer.text for answer in answers]) for answers in adapted.answers.values()}) == 3
    async with serving(adapted, roles) as (_, client):

        async def check(name: str, case: Case, answer: Answer) -> None:
            got = await ask(client, case, model=name)
            assert got["model"] == name
            assert got["choices"][0]["message"]["content"] == answer.text, (name, case.kind)
            assert got["usage"]["completion_tokens"] == len(answer.token_ids)

        for _ in range(2):  # cold, then with cached prefixes
            async with asyncio.TaskGroup() as group:
                for pair in adapted.pairs():
                    group.create_task(check(*pair))


async def test_choices_drafts_and_guidance_keep_the_adapter(adapted: Adapted) -> None:
    """Every choice of a request and its negative prompt are computed with the request's adapter."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    decode = {"kv_blocks": 512, "speculation": speculation}
    async with serving(adapted, decode=decode) as (_, client):
        place = next(i for i, case in enumerate(adapted.cases) if case.kind == "text")
        case = adapted.cases[place]
        for name, answers in adapted.answers.items():
            text = answers[place].text
            got = await ask(client, case, model=name, n=3)
            assert [choice["message"]["content"] for choice in got["choices"]] == [text] * 3
            # away from the very same prompt: only if both have the adapter nothing changes
            negative = case.messages[-1]["content"]
            guided = await ask(client, case, model=name, guidance_scale=3.0, negative_prompt=negative)
            assert guided["choices"][0]["message"]["content"] == text


async def test_requests_are_counted_by_adapter(adapted: Adapted) -> None:
    async with serving(adapted) as (cluster, client):

        async def counts() -> dict[str, float]:
            text = (await client.get("/metrics")).text
            pairs = (
                line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("epdg_lora_requests")
            )
            return {name.removeprefix("epdg_lora_requests_"): float(number) for name, number in pairs}

        body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 400, "ignore_eos": True}
        names = ("plain", "demo:plain", "attention", "demo")
        requests = [
            asyncio.create_task(client.post("/v1/chat/completions", json={**body, "model": name}))
            for name in names
        ]
        async with asyncio.timeout(60):
            while cluster.door.num_running < len(names):
                await asyncio.sleep(0)
        idle = {
            f'{kind}{{adapter="{name}"}}': 0.0 for kind in ("running", "waiting") for name in adapted.folders
        }
        assert await counts() == idle | {'running{adapter="plain"}': 2.0, 'running{adapter="attention"}': 1.0}
        for request in requests:
            assert (await request).status_code == 200
        assert await counts() == idle


async def test_kv_is_shared_under_one_adapter_alone(adapted: Adapted) -> None:
    messages = [{"role": "user", "content": "a red square and a blue circle " * 12}]

    async def cached(name: str) -> int:
        body = {"model": name, "messages": messages, "max_tokens": 2, "temperature": 0}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with serving(adapted) as (_, client):
        assert [await cached(name) for name in ("demo", "plain", "attention")] == [0, 0, 0]
        again = [await cached(name) for name in ("demo", "plain", "demo:plain", "attention")]
    assert min(again) > 0 and len(set(again)) == 1


async def test_models_are_listed_with_their_parent_and_unknown_ones_are_not_found(adapted: Adapted) -> None:
    async with serving(adapted) as (_, client):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [
            ("demo", None), ("attention", "demo"), ("plain", "demo"),
        ]  # fmt: skip
        assert (await client.get("/v1/models/plain")).json()["parent"] == "demo"
        assert (await client.get("/v1/models/other")).status_code == 404
        for name in ("other", "demo:other", "demo:", "other:plain"):
            body = {"model": name, "messages": [{"role": "user", "content": "a"}]}
            response = await client.post("/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (404, "model"), name
        for path, body in {
            "/v1/completions": {"model": "plain", "prompt": "a b", "max_tokens": 2},
            "/v1/responses": {"model": "plain", "input": "a b", "max_output_tokens": 2},
            "/v1/messages": {
                "model": "plain", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2,
            },
            "/tokenize": {"model": "plain", "prompt": "a b"},
        }.items():  # fmt: skip
            response = await client.post(path, json=body)
            assert response.status_code == 200, (path, response.text)
            assert response.json().get("model", "plain") == "plain"
