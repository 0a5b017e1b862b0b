"""The page in Chromium, against the shipped cluster: every modality dropped on it, stop, JSON, the timeline,
the pools under load and without a worker."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from pathlib import Path

import httpx
import pytest

from bench.chromium import ANSWER, BINARY, answer, ask, page
from bench.metrics import wait_idle
from tests.serve.test_replicas import pid_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="there is no Chromium (Debian: apt-get install chromium)"),
]
EXAMPLES = Path(__file__).parents[2] / "deploy" / "demo_model" / "examples"
STAGES = "[...document.querySelectorAll('#ledger th[scope=row]')].map((stage) => stage.textContent)"
LOAD = 24  # requests at once


async def test_every_modality_is_dropped_shown_and_answered(cluster_url):
    known = json.loads((EXAMPLES / "answers.json").read_text())
    fields = json.dumps({"cache_salt": secrets.token_hex(8)})  # other tests ask about the same files
    async with page(cluster_url) as tab:
        await tab.value(f"document.getElementById('fields').value = '{fields}'")
        for name, expected in known.items():
            await tab.value("document.getElementById('clear').click()")
            await tab.drop(EXAMPLES / name)
            await tab.until("document.querySelectorAll('#attachments li').length === 1")
            await ask(tab, expected["question"])
            assert await answer(tab) == expected["answer"]
            assert await tab.value("document.querySelectorAll('.question .files li').length") == 1
            stages = await tab.value(STAGES)
            assert {"Encode", "Prefill", "First decode step", "File 1"} <= set(stages)
        await tab.until("/[1-9]\\d* encoded/.test(document.querySelector('.pool.encode').textContent)")


async def test_a_stopped_answer_keeps_its_text_and_nothing_is_held(cluster_url):
    async with page(cluster_url) as tab:
        await tab.value(
            """document.getElementById('fields').value = '{"ignore_eos": true, "max_tokens": 1500}'"""
        )
        await ask(tab, "Count from 3 to 9.")
        await tab.until(f"{ANSWER}.querySelector('.text').textContent.length > 20")
        await tab.press("Escape")
        assert (await answer(tab)).startswith("3, 4, 5")
        assert "stopped" in await tab.value(f"{ANSWER}.textContent")
        assert await tab.value("document.getElementById('send').textContent") == "Send"
        await tab.until("document.getElementById('pools').textContent.includes('0 requests in flight')")
    assert wait_idle(cluster_url, timeout_s=60) == {}


async def test_a_schema_is_held_and_the_answer_is_shown_as_json(cluster_url):
    async with page(cluster_url) as tab:
        await tab.value("document.querySelector('details').open = true")
        await tab.value("document.getElementById('example').click()")
        await tab.drop(EXAMPLES / "red_circle.png")
        await tab.until("document.querySelectorAll('#attachments li').length === 1")
        await ask(tab, "Describe the image.")
        assert set(json.loads(await answer(tab))) == {"shape", "color"}
        assert await tab.value(f"{ANSWER}.querySelector('pre') !== null")


async def test_a_broken_file_is_named_in_the_error(cluster_url, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes((EXAMPLES / "red_circle.png").read_bytes()[:60])
    async with page(cluster_url) as tab:
        await tab.drop(broken)
        await tab.until("document.querySelectorAll('#attachments li').length === 1")
        await ask(tab, "Describe the image.")
        assert (await answer(tab)).startswith("broken.png")
        await ask(tab, "Count from 3 to 9.")  # without the question that failed
        assert await answer(tab) == "3, 4, 5, 6, 7, 8, 9."


async def test_pools_show_load_and_a_worker_that_is_gone(cluster):
    body = {
        "model": "demo_model",
        "messages": [{"role": "user", "content": "Count from 3 to 9."}],
        "max_tokens": 600,
        "ignore_eos": True,
    }
    decode = "document.querySelector('.pool.decode').textContent"
    async with page(cluster.url) as tab, httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
        await tab.until(f"{decode}.includes('decode 1')")
        load = [asyncio.ensure_future(client.post("/v1/chat/completions", json=body)) for _ in range(LOAD)]
        await tab.until(f"/[1-9]\\d* in flight/.test({decode})")
        os.kill(pid_of(cluster, "Decode"), signal.SIGKILL)
        await tab.until(f"{decode}.includes('no worker')")
        await tab.until(f"{decode}.includes('decode 1')")
        assert {answer.status_code for answer in await asyncio.gather(*load)} == {200}
