"""Many requests, some of whose clients disconnect at random moments; afterwards the cluster must hold
nothing.

    python -m bench.soak --url http://127.0.0.1:8000 --num-requests 1000 --cancelled-ratio 0.2

Streams mixed requests at a fixed concurrency and closes the connection of a fifth of them after a random
time. Then waits until the cluster is idle and reads /metrics: in-flight choices, requests, blocks, bytes and
open leases must be zero in every worker. Exit status 1 if anything is still held or a request that was not
cancelled got no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.workload import Case, make_cases

HELD = (
    "epdg_door_flights",
    "epdg_worker_running",
    "epdg_worker_waiting",
    "epdg_worker_queued_units",
    "epdg_worker_used_blocks",
    "epdg_worker_open_leases",
    "epdg_worker_media_bytes",
    "epdg_worker_sending_bytes",
)


async def stream(client: httpx.AsyncClient, model_id: str, case: Case) -> str:
    """Read one streamed answer to its end; returns its outcome."""
    body = {"model": model_id, "messages": case.messages, "max_tokens": 64, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return f"http {response.status_code}"
        last = ""
        async for line in response.aiter_lines():
            last = line or last
        return "answered" if last == "data: [DONE]" else "broken off"


async def run(
    url: str, cases: list[Case], concurrency: int, cancelled_ratio: float, seed: int
) -> Counter[str]:
    rng = random.Random(seed)
    slots = asyncio.Semaphore(concurrency)
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=2 * concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        model_id = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(case: Case, leaves_after_s: float | None) -> None:
            async with slots:
                try:
                    async with asyncio.timeout(leaves_after_s):
                        outcomes[await stream(client, model_id, case)] += 1
                except TimeoutError:
                    outcomes["left"] += 1

        leaving = set(rng.sample(range(len(cases)), round(cancelled_ratio * len(cases))))
        await asyncio.gather(
            *(one(case, rng.uniform(0, 0.4) if i in leaving else None) for i, case in enumerate(cases))
        )
    return outcomes


def read_held(url: str) -> dict[str, float]:
    """Every metric that must be zero in an idle cluster and is not, with its value."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in HELD and sample.value != 0
    }


def wait_idle(url: str, timeout_s: float) -> dict[str, float]:
    """Waits until nothing is held. Returns what is still held after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (held := read_held(url)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--cancelled-ratio", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cases = make_cases(args.seed, args.num_requests)
    started_at = time.monotonic()
    outcomes = asyncio.run(run(args.url, cases, args.concurrency, args.cancelled_ratio, args.seed))
    elapsed_s = time.monotonic() - started_at
    held = wait_idle(args.url, timeout_s=30)
    print(json.dumps({"outcomes": outcomes, "seconds": round(elapsed_s, 1), "still_held": held}))
    return 0 if not held and set(outcomes) <= {"answered", "left"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
