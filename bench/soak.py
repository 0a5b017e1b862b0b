"""Many requests, some of whose clients disconnect at random moments. Nothing may be held afterwards, and
nothing may grow meanwhile.

    python -m bench.soak --url http://127.0.0.1:8000 --num-requests 1000 --cancelled-ratio 0.2
    python -m bench.soak --minutes 90 [--config FILE]

Streams mixed requests at a fixed concurrency and closes the connection of a fifth of them after a random
time. Then waits until the cluster is idle and reads /metrics: in-flight choices, requests, blocks, bytes and
open leases must be zero in every worker.

With `--minutes` it starts a cluster of its own, loads it for so long and has a verdict for each series
(`bench.soak_series`): memory, descriptors and threads of each kind of process, /dev/shm, latency. A day at
one request per second is 86,400 requests. Linux only; other programs on the machine disturb latency and
/dev/shm.

Exit status 1 if anything is still held, a request that was not cancelled got no answer, or a series grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import aiohttp

from bench import clusters, metrics
from bench.arguments import DEFAULT_URL, parser_of
from bench.client import TimedAnswer, open_session, post
from bench.processes import Processes
from bench.soak_series import Sampler, table
from bench.workload import KINDS, Case, make_case, make_cases
from deploy.serving.command import DEFAULT_CONFIG

NUM_SAMPLES = 120
TIMEOUT_S = 120.0


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, case: Case, answer: TimedAnswer | None = None
) -> str:
    """Reads one streamed answer to its end; returns its outcome."""
    answer = TimedAnswer(case.kind) if answer is None else answer
    body = {"model": model, "messages": case.messages, "max_tokens": 64, "temperature": 0, "stream": True}
    await post(session, url, json.dumps(body).encode(), answer)
    if answer.failure:
        return answer.failure
    return "answered" if answer.is_over else "broken off"


async def run(
    url: str,
    cases: Iterable[Case],
    concurrency: int,
    cancelled_ratio: float,
    seed: int,
    on_answer: Callable[[TimedAnswer], None] = lambda answer: None,
) -> Counter[str]:
    """`on_answer` is given each complete answer."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    left, model = enumerate(cases), await asyncio.to_thread(metrics.model_id, url)

    async def one_after_another(session: aiohttp.ClientSession) -> None:
        for number, case in left:
            leaves = int((number + 1) * cancelled_ratio) > int(number * cancelled_ratio)
            leaves_after_s, answer = rng.uniform(0, 0.4) if leaves else None, TimedAnswer(case.kind)
            try:
                async with asyncio.timeout(leaves_after_s):
                    outcome = await stream(session, url, model, case, answer)
            except TimeoutError:
                outcome = "left"
            outcomes[outcome] += 1
            if outcome == "answered":
                on_answer(answer)

    async with open_session(TIMEOUT_S) as session:
        await asyncio.gather(*(one_after_another(session) for _ in range(concurrency)))
    return outcomes


def endless(seed: int, until: float) -> Iterator[Case]:
    """New cases until that instant of `time.monotonic`."""
    rng = random.Random(seed)
    for kind in itertools.cycle(KINDS):
        if time.monotonic() >= until:
            return
        yield make_case(rng, kind)


async def load_and_sample(url: str, sampler: Sampler, args: argparse.Namespace) -> Counter[str]:
    seconds = 60 * args.minutes
    cases = endless(args.seed, time.monotonic() + seconds)
    sampling = asyncio.create_task(sampler.sample_every(seconds / NUM_SAMPLES))
    try:
        return await run(
            url, cases, args.concurrency, args.cancelled_ratio, args.seed, sampler.latency.add_answer
        )
    finally:
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling


def soak(args: argparse.Namespace) -> int:
    """Runs for so many minutes, on a cluster of its own."""
    with clusters.running(clusters.configuration(base=args.config)) as cluster:
        sampler = Sampler(Processes(cluster.folder).by_kind)
        outcomes = asyncio.run(load_and_sample(cluster.url, sampler, args))
        held = metrics.wait_idle(cluster.url, timeout_s=30)
    number = sum(outcomes.values())
    print(f"{number} requests in {args.minutes:g} min: {dict(outcomes)}")
    print(f"as many as in {number / 3600:.2f} h at one request per second")
    print(f"still held: {held or 'nothing'}")
    verdicts = sampler.verdicts()
    print(table(verdicts, 1000 / max(1, number) * 60 * args.minutes))
    grows = any(verdict.rises for verdict in verdicts)
    return 0 if not held and not grows and set(outcomes) <= {"answered", "left"} else 1


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="start a cluster and load it for so long")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="of that cluster")
    parser.add_argument("--cancelled-ratio", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.minutes is not None:
        return soak(args)
    cases = make_cases(args.seed, args.num_requests)
    started_at = time.monotonic()
    outcomes = asyncio.run(run(args.url, cases, args.concurrency, args.cancelled_ratio, args.seed))
    elapsed_s = time.monotonic() - started_at
    held = metrics.wait_idle(args.url, timeout_s=30)
    print(json.dumps({"outcomes": outcomes, "seconds": round(elapsed_s, 1), "still_held": held}))
    return 0 if not held and set(outcomes) <= {"answered", "left"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
