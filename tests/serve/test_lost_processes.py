"""kill -9 of a door and of the HAProxy in front of it: only what is open there ends, and nothing stays held.
kill -9 of Serve's controller and of the GCS: no request notices, and no replica is replaced. kill -9 of the
raylet: no request notices, until a pool is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from bench.processes import REPLICAS, Processes
from bench.ray_access import ray_headers
from deploy.serving.launch import LocalCluster, processes_of
from tests.fakes.slow_params import often
from tests.serve.conftest import audit, configuration
from tests.serve.test_replicas import GUARD_S, HANG_S, pid_of

LONG, SHORT = 1500, 4


def body(num_tokens: int, **more: object) -> dict:
    messages = [{"role": "user", "content": "hello"}]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return {"model": "demo_model", "messages": messages, **fields, **more}


async def test_a_killed_door_costs_its_streams_and_holds_nothing(cluster: LocalCluster) -> None:
    async with (
        asyncio.timeout(4 * HANG_S),
        httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body(LONG, stream=True)) as stream,
    ):
        lines = stream.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data:"))["choices"]
        whole = asyncio.create_task(client.post("/v1/chat/completions", json=body(LONG)))
        await until_two_are_in_work(client)
        os.kill(pid_of(cluster, "Door"), signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in lines:
                pass
        answer = await whole  # no byte of it had been sent, so HAProxy asked the next door
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == LONG
    audit(cluster)


async def until_two_are_in_work(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(HANG_S):
        while "epdg_door_flights 2.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def test_a_killed_haproxy_is_replaced(cluster: LocalCluster) -> None:
    (old,) = Processes(cluster.folder).of("haproxy")
    os.kill(old, signal.SIGKILL)
    async with asyncio.timeout(HANG_S), httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
        while True:
            try:
                answer = await client.post("/v1/chat/completions", json=body(SHORT))
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            assert answer.status_code == 200, answer.text  # refused or right; never 404
            break
    audit(cluster)


@pytest.mark.parametrize("kind", often(["controller", "gcs"], ["controller"]))
async def test_requests_and_replicas_do_not_notice(cluster: LocalCluster, kind: str) -> None:
    processes = Processes(cluster.folder)
    (old,) = processes.of(kind)
    before = {replica: processes.of(replica) for replica in REPLICAS}
    async with asyncio.timeout(GUARD_S), httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=body(LONG)))
        os.kill(old, signal.SIGKILL)
        while processes.of(kind) in ([], [old]):
            assert (await client.post("/v1/chat/completions", json=body(SHORT))).status_code == 200
        assert (await answer).status_code == 200
        await until_taken_over(cluster, client)
    assert {replica: processes.of(replica) for replica in REPLICAS} == before


@pytest.mark.slow  # a cluster of its own, and Ray's checks take time
async def test_without_a_raylet_a_cluster_answers_until_a_pool_is_lost(tmp_path: Path) -> None:
    with LocalCluster(configuration(tmp_path)) as local:
        local.wait_ready()
        (raylet,) = Processes(local.folder).of("raylet")
        os.kill(raylet, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=local.url, timeout=HANG_S) as client:
            for _ in range(40):  # Ray's checks of a raylet: each second, and five in 15 s
                assert (await client.post("/v1/chat/completions", json=body(SHORT))).status_code == 200
                await asyncio.sleep(0.5)
        (decode,) = Processes(local.folder).of("decode")
        os.kill(decode, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            while not local.has_ended():
                await asyncio.sleep(0.1)


@pytest.mark.slow  # a cluster of its own
async def test_no_worker_outlives_the_driver(tmp_path: Path) -> None:
    with LocalCluster(configuration(tmp_path)) as local:
        local.wait_ready()
        processes = Processes(local.folder)
        (driver,) = (pid for pid in processes_of(local.folder) if is_driver(pid))
        os.kill(driver, signal.SIGKILL)
        workers = (*REPLICAS, "controller")
        async with asyncio.timeout(HANG_S):
            while not local.has_ended() or any(map(processes.of, workers)):
                await asyncio.sleep(0.1)
        assert not any(map(processes.of, workers))


def is_driver(pid: int) -> bool:
    return b"deploy.serving.driver" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


async def until_taken_over(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
    """Serve's controller lists all replicas as running, and Ray's dashboard, which starts late on a busy
    machine, says so."""
    while (url := cluster.dashboard_url()) is None:
        await asyncio.sleep(0.2)
    states: list[str] = []
    while len(states) < len(REPLICAS) or set(states) != {"RUNNING"}:
        answer = await client.get(f"{url}/api/serve/applications/", headers=ray_headers(cluster.folder))
        deployments = answer.json()["applications"]["epdg"]["deployments"] if answer.is_success else {}
        states = [each["state"] for deployment in deployments.values() for each in deployment["replicas"]]
        await asyncio.sleep(0.2)
