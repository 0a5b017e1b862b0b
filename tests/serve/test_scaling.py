"""Pools that are scaled by the shipped policy, on a live cluster: more load brings a replica, less load takes
it away, and no request is lost meanwhile. Slow: starts a cluster of its own and two replicas more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.serving.launch import LocalCluster
from deploy.serving.ports import free_port
from tests.serve.conftest import CLUSTER, audit
from tests.serve.test_replicas import HANG_S, until_running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One prefill worker that is not to be busy for more than a hundredth of its time."""
    config = yaml.safe_load((CLUSTER.parent / "cluster-scaled.yaml").read_text())
    config["http_options"]["port"] = free_port()
    (application,) = config["applications"]
    application["autoscaling_policy"]["policy_kwargs"] |= {"utilisation": 0.01, "start_s": 5, "drain_s": 5}
    for each in application["deployments"]:
        each["autoscaling_config"] = each["autoscaling_config"] | {
            "max_replicas": 2 if each["name"] == "Prefill" else 1
        }
    path = tmp_path_factory.mktemp("scaled") / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    with LocalCluster(path) as local:
        local.wait_ready()
        yield local
        audit(local)


async def test_a_pool_grows_and_shrinks_with_its_load_and_loses_no_request(scaled):
    statuses: list[int] = []
    async with httpx.AsyncClient(base_url=scaled.url, timeout=HANG_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        is_over = asyncio.Event()

        async def keep_asking(number: int) -> None:
            turn = 0
            while not is_over.is_set():
                turn += 1
                prompt = f"{number} {turn} " + "of all the words that are here, " * 20
                body = {"model": model, "prompt": prompt, "max_tokens": 4}
                statuses.append((await client.post("/v1/completions", json=body)).status_code)

        clients = [asyncio.create_task(keep_asking(number)) for number in range(4)]
        await until_running(client, "prefill", 2)
        before = len(statuses)
        while len(statuses) < before + 20:  # with both
            await asyncio.sleep(0.05)
        is_over.set()
        await asyncio.gather(*clients)
        is_over.clear()
        await until_running(client, "prefill", 1)
        assert (await client.get("/health")).status_code == 200
    assert set(statuses) == {200}


def test_a_reason_for_every_change_is_in_the_controllers_log(scaled):
    log = "".join(
        path.read_text() for path in Path(scaled.folder).glob("ray/session_2*/logs/serve/controller*")
    )
    assert "scaling: Prefill 1 -> 2 (arrivals)" in log
    assert "scaling: Prefill 2 -> 1 (idle)" in log
