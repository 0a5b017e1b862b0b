"""The processes of replicas: their priority; those that die under load are noticed, named and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.processes import Processes
from deploy.serving.launch import processes_of
from tests.fakes.slow_params import often

PAUSE_S, HANG_S, GUARD_S = 0.05, 120.0, 300.0


def pids_of(cluster, pool: str) -> list[int]:
    title = f"ray::ServeReplica:epdg:{pool}".encode()
    return [pid for pid in processes_of(cluster.folder) if title in Path(f"/proc/{pid}/cmdline").read_bytes()]


def pid_of(cluster, pool: str) -> int:
    return pids_of(cluster, pool)[0]


@contextmanager
def stopped_controller(cluster) -> Iterator[None]:
    """Serve's controller tells doors of no death and replaces nothing meanwhile."""
    (controller,) = Processes(cluster.folder).of("controller")
    os.kill(controller, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(controller, signal.SIGCONT)


def wait_for_health(url: str, status: int) -> None:
    deadline = time.monotonic() + GUARD_S
    with httpx.Client(base_url=url, timeout=HANG_S) as client:  # to make one takes longer than to ask
        while client.get("/health").status_code != status:
            assert time.monotonic() < deadline, f"/health was never {status}"
            time.sleep(PAUSE_S)


async def until_running(client: httpx.AsyncClient, pool: str, num_workers: int) -> None:
    """The door tells of so many workers of the pool (`encode`, …)."""
    async with asyncio.timeout(GUARD_S):
        while (await client.get("/metrics")).text.count(f'epdg_worker_running{{pool="{pool}"') != num_workers:
            await asyncio.sleep(0.05)


def ask(url: str) -> httpx.Response:
    model = httpx.get(f"{url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S)


@pytest.mark.parametrize("pool", ["Encode", "Prefill", "Decode", "Door"])
def test_a_replica_has_the_priority_of_the_command_that_started_it(cluster, pool):
    """Not the low one that Ray gives to its workers: every other program would go before them."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids_of(cluster, pool)} == {own}


@pytest.mark.parametrize("pool", ["Encode", "Prefill", "Decode", "Door"])
def test_a_replica_is_forked_and_leads_a_process_group(cluster, pool):
    for pid in pids_of(cluster, pool):
        parent, group = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:3])
        assert b"deploy.serving.fork_server" in Path(f"/proc/{parent}/cmdline").read_bytes()
        assert group == pid  # the raylet kills the group of a worker that has ended


@pytest.mark.parametrize("pool", often(["Encode", "Prefill", "Decode"], ["Decode"]))
def test_a_killed_worker_is_noticed_at_once_and_replaced(cluster, pool):
    """The door notices the end of its connection. A prefill worker: test_tensor_parallel."""
    old = pid_of(cluster, pool)
    with stopped_controller(cluster):
        os.kill(old, signal.SIGKILL)
        wait_for_health(cluster.url, 503)
    wait_for_health(cluster.url, 200)
    assert pid_of(cluster, pool) != old
    assert ask(cluster.url).status_code == 200
