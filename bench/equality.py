"""The law of the house against a running cluster: greedy answers over HTTP equal `generate` of the undivided
model in fp32.

    python -m bench.equality --url http://127.0.0.1:8000 --num-requests 204

Sends the same requests at concurrency 1, 8 and 32; the first pass meets cold caches, the later ones warm
caches. Compares text, number of tokens and finish reason of every answer. Exit status 1 if any differs.
"""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp

from bench.arguments import DEFAULT_URL, add_model, parser_of
from bench.client import TimedAnswer, open_session, post
from bench.metrics import model_id
from bench.workload import Answer, Case, Reference, make_cases

MAX_TOKENS = 32
TIMEOUT_S = 120.0


async def check(
    session: aiohttp.ClientSession, url: str, model: str, case: Case, answer: Answer
) -> str | None:
    """A sentence that says how the cluster's answer differs; None if it does not."""
    body = {"model": model, "messages": case.messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    got = TimedAnswer(case.kind)
    await post(session, url, json.dumps(body).encode(), got)
    if got.failure:
        return f"{case.kind}: {got.failure}"
    seen = (got.text, got.num_tokens, got.num_prompt_tokens)
    wanted = (answer.text, len(answer.token_ids), answer.num_prompt_tokens)
    if seen != wanted:
        return f"{case.kind}: {seen} instead of {wanted}"
    if got.reasons[0] != "stop" and len(answer.token_ids) < MAX_TOKENS:
        return f"{case.kind}: finished by {got.reasons[0]}"
    return None


async def run(url: str, expected: list[tuple[Case, Answer]], concurrency: int) -> tuple[list[str], float]:
    """(differences, seconds)."""
    slots, model = asyncio.Semaphore(concurrency), await asyncio.to_thread(model_id, url)
    async with open_session(TIMEOUT_S, keeps_connections=True) as session:

        async def one(case: Case, answer: Answer) -> str | None:
            async with slots:
                return await check(session, url, model, case, answer)

        started_at = time.monotonic()
        faults = await asyncio.gather(*(one(case, answer) for case, answer in expected))
        return [fault for fault in faults if fault], time.monotonic() - started_at


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default=DEFAULT_URL)
    add_model(parser, "the folder that the cluster serves")
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
