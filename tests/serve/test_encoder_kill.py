"""kill -9 of one of two encoders under load: every answer comes, and is right."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from bench.workload import Reference, make_cases
from deploy.serving.launch import LocalCluster
from tests.serve.conftest import audit
from tests.serve.test_replicas import pid_of, until_running

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
MAX_TOKENS = 16
NUM_CASES = 16
pytestmark = pytest.mark.slow  # a second cluster; tests/flow kills workers in every run


async def test_an_encoder_that_is_killed_under_load_costs_no_request(parallel: LocalCluster) -> None:
    cases = [case for case in make_cases(41, 2 * NUM_CASES) if case.kind != "text"][:NUM_CASES]
    reference = Reference(MODEL)
    expected = [reference.answer(case, MAX_TOKENS).text for case in cases]
    async with httpx.AsyncClient(base_url=parallel.url, timeout=120) as client:
        await until_running(client, "encode", 2)
    assert await ask_all(parallel, cases) == expected
    audit(parallel)


async def ask_all(local: LocalCluster, cases: list) -> list[str]:
    """All at once; an encoder is killed as soon as the first has been answered."""
    killed = asyncio.Event()

    async def ask(client: httpx.AsyncClient, messages: list) -> str:
        body = {"model": "demo_model", "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        response = await client.post(f"{local.url}/v1/chat/completions", json=body)
        if not killed.is_set():
            killed.set()
            os.kill(pid_of(local, "Encode"), signal.SIGKILL)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        return await asyncio.gather(*(ask(client, case.messages) for case in cases))
