"""Thousands of almost valid HTTP requests against a running cluster; afterwards the cluster must be as it was
before.

    python -m bench.fuzz --url http://127.0.0.1:8000 --num 10000 --seed 1

Sends mutations of valid requests (`bench.fuzz.mutator`) in phases: mutated requests, a quarter as many valid
requests, none. A well-behaved stream runs during all of them. Prints one JSON object: statuses, faults of the
server, the workers before and after, what is still held, delays of the door's event loop, and the stream's
inter-token latency in each phase.

Exit status 1 if the server failed a request, lost a worker, still holds something at the end, or answers
another way than before. `--repeat NUMBER` sends one case and prints it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from typing import Any

import httpx

from bench.arguments import DEFAULT_URL, parser_of
from bench.fuzz.beside import Beside
from bench.fuzz.corpus import CHAT, seeds
from bench.fuzz.mutator import KINDS, HttpCase, Mutator
from bench.fuzz.wire import Reply, send
from bench.metrics import model_id, page, samples, wait_idle
from deploy.simulator.results import percentile

QUIET_S = 8.0
PHASE_CASES = 500
LAGS = {
    "late": "epdg_door_event_loop_lag_seconds_bucket",
    "busy": "epdg_door_event_loop_busy_seconds_bucket",
}


class Fuzz:
    def __init__(self, url: str, model_id: str, seed: int, concurrency: int):
        self._url = url
        self._mutator = Mutator(seeds(model_id), seed)
        self._slots = asyncio.Semaphore(concurrency)
        self.beside = Beside(url, model_id)
        self.statuses: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.lags: dict[str, Counter[str]] = {"fuzz": Counter(), "valid": Counter(), "quiet": Counter()}

    async def run(self, num_cases: int) -> None:
        beside = asyncio.ensure_future(self.beside.run())
        try:
            for first in range(0, num_cases, PHASE_CASES):
                numbers = range(first, min(first + PHASE_CASES, num_cases))
                await self._phase("fuzz", numbers, KINDS)
                await self._phase("valid", numbers[: len(numbers) // 4], ("valid",))
                await self._phase("quiet", range(0), ())
                print(f"{numbers[-1] + 1} sent, {len(self.faults)} faults", flush=True)
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def one(self, number: int, kinds: tuple[str, ...] = KINDS) -> tuple[HttpCase, Reply]:
        case = self._mutator.case(number, kinds)
        async with self._slots:
            return case, await send(self._url, case)

    async def _phase(self, name: str, numbers: range, kinds: tuple[str, ...]) -> None:
        before = await self._lag()
        self.beside.phase = f"{name} {numbers.start}"  # a stream that spans two phases counts for neither
        for task in asyncio.as_completed([self._judged(number, kinds) for number in numbers]):
            await task
        if not numbers:
            await asyncio.sleep(QUIET_S)
        self.lags[name].update(await self._lag() - before)

    async def _judged(self, number: int, kinds: tuple[str, ...]) -> None:
        case, reply = await self.one(number, kinds)
        # a server may disconnect a client that does not speak HTTP
        is_broken = not reply.status and case.kind != "wire"
        outcome = "overload" if reply.is_overload else str(reply.status or reply.error)
        self.statuses[f"{case.kind} {outcome}"] += 1
        if is_broken or (reply.status >= 500 and not reply.is_overload):
            body = case.body[:4000].decode("latin-1")
            self.faults.append(
                {
                    "number": number,
                    "kind": case.kind,
                    "outcome": outcome,
                    "answer": str(reply.body[:500]),
                    "body": body,
                }
            )

    async def _lag(self) -> Counter[str]:
        """Ticks of the door's event loop that were late by more than a bound ("late"), and those in which the
        door's process itself computed for longer than the bound ("busy").
        """
        text = await asyncio.to_thread(page, self._url)
        counts: Counter[str] = Counter()
        for name, metric in LAGS.items():
            below = {each.labels["le"]: int(each.value) for each in samples(text, metric)}
            total = counts["ticks"] = below.get("+Inf", 0)
            for bound in ("0.1", "0.25"):
                counts[f"{name} over {bound} s"] = total - below.get(bound, 0)
        return counts


def workers(url: str) -> list[str]:
    """Every worker that the door is connected to."""
    return sorted(each.labels["replica"] for each in samples(page(url), "epdg_worker_running"))


def control(url: str, model: str) -> str:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(url + CHAT, json=body, timeout=120).raise_for_status().json()
    return answer["choices"][0]["message"]["content"]


def latencies(beside: Beside) -> dict[str, dict[str, float]]:
    """The latencies of the stream that runs during the cases, in milliseconds, over all phases of a name."""
    report = {}
    for name in ("quiet", "valid", "fuzz"):
        gaps_s = [gap_s for phase, some in beside.gaps_s.items() if phase.startswith(name) for gap_s in some]
        if gaps_s:
            p50_s, p99_s = (percentile(gaps_s, share) for share in (0.5, 0.99))
        else:
            p50_s = p99_s = math.nan
        report[name] = {
            "tokens": len(gaps_s),
            "p50_ms": round(1e3 * p50_s, 2),
            "p99_ms": round(1e3 * p99_s, 2),
        }
    return report


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--repeat", type=int)
    args = parser.parse_args()
    model = model_id(args.url)
    fuzz = Fuzz(args.url, model, args.seed, args.concurrency)
    if args.repeat is not None:
        print(*asyncio.run(fuzz.one(args.repeat)), sep="\n")
        return 0
    before, said = workers(args.url), control(args.url, model)
    started_at = time.monotonic()
    asyncio.run(fuzz.run(args.num))
    elapsed_s = time.monotonic() - started_at
    held = wait_idle(args.url, timeout_s=60)
    is_as_before = workers(args.url) == before and control(args.url, model) == said
    itl = latencies(fuzz.beside)
    report = {
        "cases": args.num,
        "seed": args.seed,
        "seconds": round(elapsed_s, 1),
        "statuses": dict(sorted(fuzz.statuses.items())),
        "faults": fuzz.faults,
        "workers": before,
        "as_before": is_as_before,
        "still_held": held,
        "streams_failed": fuzz.beside.num_failed,
        "loop_lag": fuzz.lags,
        "itl": itl,
        "itl_p99_ratio": {
            name: round(itl["fuzz"]["p99_ms"] / itl[name]["p99_ms"], 2) for name in ("quiet", "valid")
        },
    }
    print(json.dumps(report, indent=1))
    return 0 if is_as_before and not (fuzz.faults or held or fuzz.beside.num_failed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
