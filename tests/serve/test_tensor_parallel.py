"""A cluster whose prefill and decode workers are two processes each: it answers like any other, and loses and
replaces a rank."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import httpx
import pytest

from bench import DEMO_MODEL, equality
from bench.workload import Reference, make_cases
from deploy.serving.launch import LocalCluster, processes_of
from tests.serve.test_replicas import (
    HANG_S,
    ask,
    pid_of,
    pids_of,
    stopped_controller,
    until_running,
    wait_for_health,
)

pytestmark = pytest.mark.slow  # a second cluster


def rank_of(cluster: LocalCluster, leader: int) -> int:
    """Process id of rank 1 of the worker whose rank 0 is `leader`."""
    return next(pid for pid in processes_of(cluster.folder) if parent_of(pid) == leader)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_greedy_answers_equal_generate(parallel):
    reference = Reference(DEMO_MODEL)
    expected = [(case, reference.answer(case, equality.MAX_TOKENS)) for case in make_cases(79, 24)]
    faults, _ = asyncio.run(equality.run(parallel.url, expected, 8))
    assert faults == []


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 0.8, "seed": 4},
        {"guidance_scale": 2.5, "negative_prompt": "no", "temperature": 0},
    ],
    ids=["choices", "guidance"],
)
def test_choices_and_guidance_give_what_one_process_gives(parallel, cluster, fields):
    answers = []
    for url in (parallel.url, cluster.url):
        model = httpx.get(f"{url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "count to ten"}], "max_tokens": 40}
        response = httpx.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=HANG_S)
        assert response.status_code == 200, response.text
        answers.append([choice["message"]["content"] for choice in response.json()["choices"]])
    assert answers[0] == answers[1] and len(answers[0]) == fields.get("n", 1)


async def test_workers_are_replaced_that_lose_a_rank_or_their_first_process(parallel):
    """Both at once: the starts of two workers cost little more time than one. With rank 0 the others end."""
    async with httpx.AsyncClient(base_url=parallel.url, timeout=HANG_S) as client:
        await until_running(client, "decode", 2)  # another test may have cost one
    prefill, killed = pid_of(parallel, "Prefill"), pids_of(parallel, "Decode")[0]
    with stopped_controller(parallel):
        os.kill(rank_of(parallel, prefill), signal.SIGKILL)
        await asyncio.to_thread(wait_for_health, parallel.url, 503)
    rank = os.pidfd_open(rank_of(parallel, killed))
    os.kill(killed, signal.SIGKILL)
    has_ended, _, _ = await asyncio.to_thread(select.select, [rank], [], [], 120)
    os.close(rank)
    assert has_ended, "a rank lives on without its worker"
    async with asyncio.timeout(300), httpx.AsyncClient(base_url=parallel.url, timeout=HANG_S) as client:
        while killed in (now := pids_of(parallel, "Decode")) or len(now) < 2:
            await asyncio.sleep(0.5)
        await until_running(client, "decode", 2)
    await asyncio.to_thread(wait_for_health, parallel.url, 200)
    assert pid_of(parallel, "Prefill") != prefill
    assert ask(parallel.url).status_code == 200
