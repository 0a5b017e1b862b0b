"""Adapters that are loaded and unloaded while a whole cluster serves: answers are those of PEFT's own model
from then on, and those of other content under the same name when that is loaded."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.config.settings import ClusterArgs
from cluster.types.members import Role
from cluster.worker.setup import set_up
from prefill_service.service import prefill_worker
from router.api.app import build_api
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_adapters_served import Adapted
from tests.flow.test_law import ask, cluster_args

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapted(root: Path) -> Adapted:
    return Adapted(root)


def loading_args(root: Path) -> ClusterArgs:
    more = {"adapters_folder": str(root), "max_loras": 2, "max_lora_rank": 16}
    return ClusterArgs.model_validate(cluster_args(48).model_dump(exclude_unset=True) | more)


@asynccontextmanager
async def serving(args: ClusterArgs) -> AsyncIterator[tuple[LocalCluster, list[httpx.AsyncClient]]]:
    """A cluster with two doors, and a client of each."""
    async with local_cluster(args, num_doors=2) as cluster, AsyncExitStack() as stack:
        transports = [httpx.ASGITransport(build_api(door)) for door in cluster.doors]
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=each, base_url="http://t", timeout=120)
            )
            for each in transports
        ]
        yield cluster, clients


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **body: str) -> str:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.text


async def names(client: httpx.AsyncClient) -> dict[str, str | None]:
    """The models and their parents."""
    return {card["id"]: card["parent"] for card in (await client.get("/v1/models")).json()["data"]}


async def check(client: httpx.AsyncClient, adapted: Adapted, name: str, content: str) -> None:
    """Twice: cold or with what the cache has, and with cached prefixes."""
    for _ in range(2):
        for case, answer in zip(adapted.cases[:4], adapted.answers[content][:4], strict=True):
            got = await ask(client, case, model=name)
            assert got["choices"][0]["message"]["content"] == answer.text, (name, content, case.kind)


async def test_adapters_are_loaded_served_replaced_and_unloaded(adapted: Adapted, root: Path) -> None:
    async with serving(loading_args(root)) as (_, (first, second)):
        await check(first, adapted, "demo", "demo")
        assert "adapters_folder" in await post(first, LOAD, 400, lora_name="mine", lora_path="/etc")
        assert "added" in await post(first, LOAD, lora_name="mine", lora_path="plain")
        assert await names(first) == await names(second) == {"demo": None, "mine": "demo"}
        await check(first, adapted, "mine", "plain")
        await check(second, adapted, "demo:mine", "plain")
        await check(second, adapted, "demo", "demo")

        assert "already" in await post(second, LOAD, 400, lora_name="mine", lora_path="attention")
        assert "removed" in await post(second, UNLOAD, lora_name="mine")
        for client in (first, second):
            assert await names(client) == {"demo": None}
            body = {"model": "mine", "messages": [{"role": "user", "content": "a"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 404
        await post(first, UNLOAD, 404, lora_name="mine")

        # other content under the same name; what the caches have of the old one is not found
        await post(first, LOAD, lora_name="mine", lora_path=str(root / "attention"))
        await check(second, adapted, "mine", "attention")
        await post(second, LOAD, lora_name="other", lora_path="plain")
        await check(first, adapted, "other", "plain")
        assert "max_loras" in await post(first, LOAD, 400, lora_name="third", lora_path="plain")


async def test_a_worker_that_comes_later_gets_the_adapters(adapted: Adapted, root: Path) -> None:
    args = loading_args(root)
    async with serving(args) as (cluster, (first, second)):
        await post(first, LOAD, lora_name="mine", lora_path="plain")
        late = prefill_worker(args, set_up(args, f"late-{secrets.token_hex(4)}", transport="in_process"))
        try:
            member = await late.start()
            for door in cluster.doors:
                door.update_members(Role.PREFILL, [member])  # the other one drains
            await check(second, adapted, "mine", "plain")
            await post(second, LOAD, lora_name="other", lora_path="attention")
            await check(first, adapted, "other", "attention")
            await cluster.audit()
        finally:
            for door in cluster.doors:
                door.update_members(Role.PREFILL, [])
            await late.stop()
