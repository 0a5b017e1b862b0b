"""An adapter that is loaded into a running cluster of Ray Serve, whose workers have two ranks and guess
tokens: answers are those of PEFT's own model, also from workers that replace lost ones."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from peft import PeftModel

from bench import DEMO_MODEL, equality
from bench.workload import Reference, make_cases
from deploy.serving.launch import LocalCluster
from tests.flow.adapter_folders import save_adapter
from tests.serve.test_replicas import HANG_S, pids_of, until_running

pytestmark = pytest.mark.slow  # a second cluster
NUM_CASES = 6


async def change(client: httpx.AsyncClient, what: str, **body: str) -> None:
    response = await client.post(f"/v1/{what}_lora_adapter", json=body)
    assert response.status_code == 200, response.text


async def test_a_loaded_adapter_outlives_the_workers_that_loaded_it(
    parallel: LocalCluster, adapters_folder: Path
) -> None:
    reference: Any = Reference(DEMO_MODEL)
    targets = ("q_proj", "v_proj", "down_proj")
    folder = save_adapter(
        reference.model, adapters_folder / "v1", "language_model", targets=targets, r=4, lora_alpha=4
    )
    cases = make_cases(31, NUM_CASES)
    plain = [reference.answer(case, equality.MAX_TOKENS).text for case in cases]
    reference.model = PeftModel.from_pretrained(reference.model, folder).eval()
    expected = [reference.answer(case, equality.MAX_TOKENS).text for case in cases]
    assert expected != plain
    api = openai.AsyncOpenAI(base_url=f"{parallel.url}/v1", api_key="none", timeout=HANG_S)
    http = httpx.AsyncClient(base_url=parallel.url, timeout=HANG_S)

    async def answers() -> list[str | None]:
        made = [
            api.chat.completions.create(
                model="mine", messages=cast(Any, case.messages), temperature=0, max_tokens=equality.MAX_TOKENS
            )
            for case in cases
        ]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*made)]

    async with api, http:
        await until_running(http, "decode", 2)
        await change(http, "load", lora_name="mine", lora_path="v1")
        card: Any = await api.models.retrieve("mine")
        assert card.parent != "mine" and await answers() == expected
        lost = {pid for pool in ("Prefill", "Decode") for pid in pids_of(parallel, pool)}
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(300):
            while any(
                lost & {*(now := pids_of(parallel, pool))} or not now for pool in ("Prefill", "Decode")
            ):
                await asyncio.sleep(0.5)
        await until_running(http, "decode", 2)
        await until_running(http, "prefill", 1)
        assert await answers() == expected
        await change(http, "unload", lora_name="mine")
        with pytest.raises(openai.NotFoundError):
            await answers()
