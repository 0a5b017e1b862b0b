"""Adapters of a whole worker that is two processes: those of the settings, and those that it loads while it
serves, whose matrices rank 0 sends to the other rank. Answers in company equal those of PEFT's own model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import transformers as hf

from cluster.config.adapters import read_adapters
from cluster.config.settings import ClusterArgs
from router.api.app import build_api
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_adapters_loaded import LOAD, UNLOAD, post
from tests.flow.test_hybrid_adapters import NUM_TOKENS, save_adapters
from tests.flow.test_windows import window_args
from tests.flow.text_models import SIZES, answers, draw_prompts, save_text_model

# Linears that ranks divide by outputs, by inputs, and by both; "" is the plain model
FORMS = {"all": ".*_proj", "inputs": ".*(q|v|up)_proj", "outputs": ".*(o|down)_proj"}


@pytest.mark.slow  # `test_tensor_parallel` has adapters, `test_hybrid_ranks` a worker of two ranks in every run
async def test_every_row_of_a_worker_of_two_ranks_has_its_own_adapter(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path, hf.LlamaConfig(**SIZES), seed=6)
    prompts = draw_prompts((5, 37, 60))
    expected = save_adapters(folder, FORMS, prompts)
    assert len({str(each) for each in expected.values()}) == 4
    folders = {name: str(folder / name) for name in FORMS}
    digests = {adapter.name: adapter.digest for adapter in read_adapters(folders, 16)}
    changes = {
        "tensor_parallel_size": 2, "adapters": {"all": folders["all"]}, "adapters_folder": str(folder),
        "max_loras": 2, "max_lora_rank": 16,
    }  # fmt: skip
    args = window_args(folder, kv_blocks=1000).model_dump(exclude_unset=True) | changes

    async def check(cluster: LocalCluster, *names: str) -> None:
        """All at once: chunks of prompts and answers of all adapters meet in one step."""
        asked = [(name, i) for i in range(len(prompts)) for name in names]
        got = await asyncio.gather(
            *(answers(cluster, prompts[i], NUM_TOKENS, adapter=digests.get(name, "")) for name, i in asked)
        )
        assert got == [[expected[name][i]] for name, i in asked]

    async with local_cluster(ClusterArgs.model_validate(args), (0, 0, 0, 1)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=120) as client:
            await check(cluster, "", "all")
            await post(client, LOAD, lora_name="mine", lora_path="inputs")
            await check(cluster, "all", "", "inputs")
            await post(client, UNLOAD, lora_name="mine")
            await post(client, LOAD, lora_name="mine", lora_path="outputs")  # in the other's place
            await check(cluster, "outputs", "", "all")
