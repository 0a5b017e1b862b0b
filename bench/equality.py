"""The law of the house against a running cluster: greedy answers over HTTP equal `generate` of the undivided
model in fp32.

    python -m bench.equality --url http://127.0.0.1:8000 --num-requests 204

Sends the same requests at concurrency 1, 8 and 32; the first pass meets cold caches, the later ones warm
caches. Compares text, number of tokens and finish reason of every answer. Exit status 1 if any differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import httpx

from bench.workload import Answer, Case, Reference, make_cases

MODEL = Path(__file__).parents[1] / "deploy" / "demo_model"
MAX_TOKENS = 32


async def check(client: httpx.AsyncClient, model_id: str, case: Case, answer: Answer) -> str | None:
    """A sentence that says how the cluster's answer differs; None if it does not."""
    body = {"model": model_id, "messages": case.messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"{case.kind}: HTTP {response.status_code}: {response.text[:200]}"
    got = response.json()
    choice, usage = got["choices"][0], got["usage"]
    expected_reason = "length" if len(answer.token_ids) == MAX_TOKENS else "stop"
    seen = (choice["message"]["content"], usage["completion_tokens"], usage["prompt_tokens"])
    wanted = (answer.text, len(answer.token_ids), answer.num_prompt_tokens)
    if seen != wanted:
        return f"{case.kind}: {seen} instead of {wanted}"
    if choice["finish_reason"] != expected_reason and len(answer.token_ids) < MAX_TOKENS:
        return f"{case.kind}: finished by {choice['finish_reason']}"
    return None


async def run(url: str, expected: list[tuple[Case, Answer]], concurrency: int) -> tuple[list[str], float]:
    """(differences, seconds)."""
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)
    ) as client:
        model_id = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(case: Case, answer: Answer) -> str | None:
            async with slots:
                return await check(client, model_id, case, answer)

        started_at = time.monotonic()
        faults = await asyncio.gather(*(one(case, answer) for case, answer in expected))
        return [fault for fault in faults if fault], time.monotonic() - started_at


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=str(MODEL), help="the folder that the cluster serves")
    parser.add_argument("--num-requests", type=int, default=204)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    reference = Reference(args.model)
    expected = [
        (case, reference.answer(case, MAX_TOKENS)) for case in make_cases(args.seed, args.num_requests)
    ]
    num_faults = 0
    for concurrency in args.concurrency:
        faults, elapsed_s = asyncio.run(run(args.url, expected, concurrency))
        num_faults += len(faults)
        report = {
            "concurrency": concurrency,
            "requests": len(expected),
            "equal": len(expected) - len(faults),
            "tokens": sum(len(answer.token_ids) for _, answer in expected),
            "seconds": round(elapsed_s, 2),
        }
        print(json.dumps(report), *faults[:5], sep="\n  ")
    return 1 if num_faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
