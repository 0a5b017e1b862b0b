"""The account of a request as its client gets it: complete, and equal to the time on the wall."""

from __future__ import annotations

import json
import random
import time

import httpx
import pytest

from bench.workload import make_case
from router.openai.app import build_api
from tests.flow.local_cluster import local_cluster
from tests.flow.test_law import cluster_args

HEADERS = {"x-epdg-ledger": "1"}
SLACK_MS = 1.0


@pytest.mark.parametrize("kind", ["text", "image", "video", "audio"])
async def test_the_stages_sum_to_the_wall_time_of_the_first_token(kind):
    case = make_case(random.Random(5), kind)
    async with local_cluster(cluster_args(64)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://door", timeout=60) as client:
            body = {
                "model": cluster.door.model_id,
                "messages": case.messages,
                "temperature": 0,
                "max_tokens": 4,
            }
            for _ in range(2):
                started_at = time.monotonic()
                answer = await client.post("/v1/chat/completions", json=body, headers=HEADERS)
                wall_ms = 1e3 * (time.monotonic() - started_at)
                (ledger,) = answer.raise_for_status().json()["ledger"]
                actual = dict(ledger["actual_ms"])
                tail_ms = actual.pop("kv_transfer") + actual.pop("first_step")
                assert sum(actual.values()) == pytest.approx(ledger["ttft_ms"], abs=SLACK_MS)
                assert min(actual.values()) > -SLACK_MS
                assert ledger["ttft_ms"] + tail_ms < wall_ms
                assert actual["prefill"] > 0 and tail_ms > 0
                assert (
                    ledger["predicted_ms"]["low"]
                    <= ledger["predicted_ms"]["ttft"]
                    <= ledger["predicted_ms"]["high"]
                )
                assert ledger["placement"]["decode"].startswith("d0")
                if kind != "text":
                    (item,) = ledger["items_ms"]
                    assert item["cached"] or item["encode"] > 0
                assert answer.headers["x-epdg-ledger"].startswith(f"ttft;dur={ledger['ttft_ms']}")


async def test_the_ledger_of_a_stream_comes_at_its_end_and_in_its_headers():
    case = make_case(random.Random(6), "image")
    async with local_cluster(cluster_args(64)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://door", timeout=60) as client:
            body = {
                "model": cluster.door.model_id,
                "messages": case.messages,
                "max_tokens": 4,
                "stream": True,
            }
            answer = await client.post("/v1/chat/completions", json=body, headers=HEADERS)
            lines = [line for line in answer.text.split("\n\n") if line]
            assert lines[-1] == "data: [DONE]"
            (ledger,) = json.loads(lines[-2].removeprefix("data: "))["ledger"]
            assert answer.headers["x-epdg-ledger"].startswith(f"ttft;dur={ledger['ttft_ms']}")
            assert set(ledger["actual_ms"]) > {"prefill", "first_step"}
