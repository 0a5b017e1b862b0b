"""A hybrid model whose prefill and decode workers are two processes each: states go from rank to rank, and so
does what adapters add, one of the settings and one that is loaded later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from tests.flow.hybrid_models import save_hybrid
from tests.flow.local_cluster import PATIENT_DOOR
from tests.flow.test_adapters_loaded import LOAD, post
from tests.flow.test_hybrid_adapters import FORMS, save_adapters
from tests.flow.text_models import draw_prompts
from tests.serve.conftest import running
from tests.serve.test_replicas import HANG_S

pytestmark = pytest.mark.slow  # a cluster of its own
NUM_TOKENS = 24


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
async def test_states_of_ranks_travel_from_prefill_to_decode(tmp_path: Path, name: str) -> None:
    """All at once, with every adapter and with none, and the second time from snapshots."""
    folder = save_hybrid(tmp_path / "model", name)
    prompts = draw_prompts((1, 5, 24, 37, 90, 33))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = save_adapters(folder, FORMS[name], prompts, NUM_TOKENS)
    texts = [
        (kind, prompt, tokenizer.decode(answer, skip_special_tokens=True))
        for kind, answers in expected.items()
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    args = {
        "model": str(folder), "tensor_parallel_size": 2, "roles": ["prefill", "decode"], "block_size": 8,
        "dtype": "float32", "door": PATIENT_DOOR, "adapters": {"all": str(folder / "all")},
        "adapters_folder": str(folder), "max_loras": 2, "max_lora_rank": 8,
    }  # fmt: skip
    with running(tmp_path, args) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]

            async def ask(kind: str, prompt: tuple[int, ...], text: str) -> tuple[str, str, str]:
                body = {"model": kind or model, "prompt": list(prompt), "max_tokens": NUM_TOKENS}
                response = await client.post("/v1/completions", json={**body, "temperature": 0})
                assert response.status_code == 200, response.text
                return kind, response.json()["choices"][0]["text"], text

            await post(client, LOAD, lora_name="mixers", lora_path="mixers")
            for _ in range(2):
                answered = await asyncio.gather(*(ask(*each) for each in texts))
                assert [each for each in answered if each[1] != each[2]] == []
