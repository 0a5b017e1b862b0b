"""Changed settings are deployed to a running cluster, as `serve deploy` does it: Serve replaces every
replica, one of a pool after the other. No request fails."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.client import open_session
from bench.ray_access import ray_headers
from bench.soak import stream
from bench.workload import make_cases
from deploy.serving.launch import LocalCluster
from tests.serve.conftest import running

DEADLINE_S = 300.0
NUM_CLIENTS = 3
CHANGED = {"decode": {"max_batch_sequences": 24}}

pytestmark = pytest.mark.slow


async def replicas(cluster: LocalCluster, client: httpx.AsyncClient) -> dict[str, str]:
    """State by replica id; empty: the controller does not answer."""
    answer = await client.get(api_of(cluster), headers=ray_headers(cluster.folder))
    deployments = answer.json()["applications"]["epdg"]["deployments"] if answer.is_success else {}
    return {
        each["replica_id"]: each["state"]
        for deployment in deployments.values()
        for each in deployment["replicas"]
    }


def api_of(cluster: LocalCluster) -> str:
    return f"{cluster.dashboard_url()}/api/serve/applications/"


def changed(cluster: LocalCluster) -> dict[str, Any]:
    content = yaml.safe_load((cluster.folder / "cluster.yaml").read_text())
    (application,) = content["applications"]
    application["args"] = {**application["args"], **CHANGED}
    return content


async def until_replaced(cluster: LocalCluster, client: httpx.AsyncClient, old: dict[str, str]) -> None:
    while True:
        now = await replicas(cluster, client)
        if len(now) == len(old) and not now.keys() & old.keys() and set(now.values()) == {"RUNNING"}:
            return
        await asyncio.sleep(0.2)


async def ask_all_the_time(url: str, outcomes: Counter[str], seed: int) -> None:
    async with open_session(DEADLINE_S, keeps_connections=True) as session:
        for case in itertools.cycle(make_cases(seed, 50)):
            outcomes[await stream(session, url, "demo_model", case)] += 1


@pytest.mark.parametrize("number", [1, 2])
async def test_no_request_fails_while_every_replica_is_replaced(tmp_path: Path, number: int) -> None:
    """With one replica of a pool requests wait for its successor, within their deadlines."""
    outcomes: Counter[str] = Counter()
    pools = dict.fromkeys(("Encode", "Prefill", "Decode", "Door"), number)
    with running(tmp_path, None, **pools) as cluster:
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=DEADLINE_S) as client:
            while cluster.dashboard_url() is None or not (old := await replicas(cluster, client)):
                await asyncio.sleep(0.2)
            load = [
                asyncio.create_task(ask_all_the_time(cluster.url, outcomes, seed))
                for seed in range(NUM_CLIENTS)
            ]
            answer = await client.put(
                api_of(cluster), json=changed(cluster), headers=ray_headers(cluster.folder)
            )
            assert answer.is_success, answer.text
            await until_replaced(cluster, client, old)
            for task in load:
                task.cancel()
            await asyncio.wait(load)
    assert set(outcomes) == {"answered"}, outcomes
