"""The baseline of `bench.encoder mixed` gives the first tokens of `generate`, so what it is compared by is
time alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import torch

from bench.encoder.synchronous import SynchronousDoor, SynchronousEngine
from bench.workload import KINDS, Reference, make_cases
from router.api.app import build_api
from tests.flow.test_law import cluster_args

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"


@pytest.mark.parametrize("max_batch_tokens", [32, 1024])
async def test_the_synchronous_server_answers_with_the_first_token_of_generate(max_batch_tokens):
    reference = Reference(MODEL)
    cases = make_cases(17, len(KINDS))
    expected = [reference.answer(case, 1).text for case in cases]
    args = cluster_args(max_batch_tokens)
    door = SynchronousDoor(args, SynchronousEngine(args, torch.float32))
    transport = httpx.ASGITransport(build_api(door))

    async def ask(client: httpx.AsyncClient, messages: list) -> str:
        body = {"model": "demo", "messages": messages, "max_tokens": 1, "temperature": 0}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        assert await asyncio.gather(*(ask(client, case.messages) for case in cases)) == expected
    await door.aclose()
