"""A hybrid model whose prefill and decode workers are two processes each: states go from rank to rank."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from tests.flow.hybrid_models import save_hybrid
from tests.flow.local_cluster import PATIENT_DOOR
from tests.flow.text_models import draw_prompts, generated
from tests.serve.conftest import running
from tests.serve.test_replicas import HANG_S

pytestmark = pytest.mark.slow  # a cluster of its own
NUM_TOKENS = 24


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
async def test_states_of_ranks_travel_from_prefill_to_decode(tmp_path: Path, name: str) -> None:
    """All at once, and the second time from snapshots."""
    folder = save_hybrid(tmp_path / "model", name)
    prompts = draw_prompts((1, 5, 24, 37, 90, 33))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = generated(folder, prompts, NUM_TOKENS)
    expected = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    args = {
        "model": str(folder), "tensor_parallel_size": 2, "roles": ["prefill", "decode"], "block_size": 8,
        "dtype": "float32", "door": PATIENT_DOOR,
    }  # fmt: skip
    with running(tmp_path, args) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]

            async def ask(prompt: tuple[int, ...]) -> str:
                body = {"model": model, "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return response.json()["choices"][0]["text"]

            for _ in range(2):
                assert await asyncio.gather(*map(ask, prompts)) == expected
