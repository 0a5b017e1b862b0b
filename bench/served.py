"""What a served token costs besides the model: CPU time, wake-ups, gaps of streams, by process. Linux only.

    python -m bench.served --tokens 400 --streams 5 --concurrency 1 [--url URL --url URL]

A stream is one greedy chat answer. The processes are all of the cluster that listens at the URL. CPU time is
the kernel's, in nanoseconds; a wake-up is a voluntary context switch. With several URLs the clusters take
turns, stream by stream, so that two versions can be compared on one machine. Figures are medians over the
streams. `--streams 0 --seconds 20`: the same of idle clusters (10 ms of CPU a second are 1 % of a core), and
the memory of their replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.arguments import DEFAULT_URL, parser_of
from bench.client import ChatRequest, Endpoint, TimedAnswer, ask, open_session
from bench.processes import PROC, REPLICAS, kind_of, memory_mib, name_of, processes_at

PERIOD_S = 0.005


@dataclass
class Run:
    """What a cluster spent while it generated `num_tokens`, or, idle, in `seconds`."""

    num_tokens: int = 0
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

    def per_unit(self, process: str) -> tuple[float, float]:
        """(ms of CPU, wake-ups) per token, or per second if there are no tokens."""
        cpu_s, num_wakes = self.spent.get(process, (0.0, 0.0))
        unit = self.num_tokens or self.seconds
        return 1e3 * cpu_s / unit, num_wakes / unit


def reading(pids: list[int]) -> dict[str, tuple[str, float, int]]:
    """Thread id → (process, CPU seconds, wake-ups) so far."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            name = name_of(pid)
            for task in (PROC / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError):
                    cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
                    status = (task / "status").read_text()
                    num_wakes = int(status.split("voluntary_ctxt_switches:", 1)[1].split()[0])
                    found[task.name] = name, cpu_s, num_wakes
    return found


async def spend(run: Run, pids: list[int], is_over: Callable[[], bool]) -> None:
    """Adds what the processes spend until it is over."""
    before, started_at = reading(pids), time.perf_counter()
    while not is_over():
        await asyncio.sleep(PERIOD_S)
    run.seconds = time.perf_counter() - started_at
    for task, (name, cpu_s, num_wakes) in reading(pids).items():
        _, old_cpu_s, old_wakes = before.get(task, (name, 0.0, 0))
        run.spent[name][0] += cpu_s - old_cpu_s
        run.spent[name][1] += num_wakes - old_wakes


async def measure(url: str, pids: list[int], args: argparse.Namespace) -> Run:
    """Measures from the first tokens of all streams until one of them is almost over."""
    request = ChatRequest([{"role": "user", "content": "Tell a long story."}], args.tokens, "")
    answers = [TimedAnswer("") for _ in range(args.concurrency)]
    server, run = Endpoint(url, args.model, {}), Run()
    async with open_session() as session:
        tasks = [asyncio.create_task(ask(session, server, request, each)) for each in answers]

        def num_tokens() -> list[int]:
            return [len(each.chunks_at) for each in answers]

        while not all(num_tokens()) and not any(task.done() for task in tasks):
            await asyncio.sleep(PERIOD_S)
        num_before, almost = sum(num_tokens()), args.tokens - 8
        await spend(run, pids, lambda: max(num_tokens()) >= almost or any(task.done() for task in tasks))
        run.num_tokens = sum(num_tokens()) - num_before
        await asyncio.gather(*tasks)
    for answer in answers:
        if answer.failure:
            raise RuntimeError(f"a stream failed: {answer.failure}")
        run.gaps_s += answer.gaps_s[1:]
    return run


def show(runs: list[Run]) -> None:
    if all(run.gaps_s for run in runs):
        middle = statistics.median(statistics.median(run.gaps_s) for run in runs)
        low = statistics.median(statistics.quantiles(run.gaps_s, n=10)[0] for run in runs)
        print(f"ITL p50 {1e3 * middle:.2f} ms, p10 {1e3 * low:.2f} ms; {len(runs)} runs")
    unit = "token" if runs[0].num_tokens else "second"
    print(f"{'process':36} {f'CPU ms/{unit}':>14} {f'wake-ups/{unit}':>16}")
    names = {name for run in runs for name in run.spent}
    costs = {name: list(zip(*(run.per_unit(name) for run in runs), strict=True)) for name in names}
    rows = {name: [statistics.median(column) for column in columns] for name, columns in costs.items()}
    for name, row in sorted(rows.items(), key=lambda item: -item[1][0]):
        print(f"{name:36} {row[0]:14.3f} {row[1]:16.2f}")
    others = [name for name in names if name not in REPLICAS]
    total = statistics.median(sum(run.per_unit(name)[0] for name in others) for run in runs)
    print(f"{'all but replicas':36} {total:14.3f}")


def show_memory(pids: list[int]) -> None:
    """Prints the memory of replicas: a page that n processes map counts
    as an n-th in the proportional size of each."""
    print(f"{'replica':36} {'PSS MiB':>14} {'USS MiB':>16}")
    for name, pid in sorted((kind_of(pid), pid) for pid in pids):
        if name in REPLICAS:
            pss, uss = memory_mib(pid)
            print(f"{name:36} {pss:14.0f} {uss:16.0f}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", action="append", help="of a cluster; may be repeated")
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=5, help="repetitions for each cluster; 0: idle")
    parser.add_argument("--seconds", type=float, default=10.0, help="idle time")
    parser.add_argument("--concurrency", type=int, default=1)
    args = parser.parse_args()
    urls = args.url or [DEFAULT_URL]
    pids = {url: processes_at(url).pids() for url in urls}
    runs: dict[str, list[Run]] = {url: [Run()] if not args.streams else [] for url in urls}
    for url in urls if not args.streams else ():
        end = time.perf_counter() + args.seconds
        asyncio.run(spend(runs[url][0], pids[url], lambda end=end: time.perf_counter() >= end))
    for _, url in itertools.product(range(args.streams), urls):
        runs[url].append(asyncio.run(measure(url, pids[url], args)))
    for url in urls:
        print(
            f"\n{url}, {args.concurrency} at once, {args.tokens} tokens each"
            if args.streams
            else f"\n{url}, idle"
        )
        show(runs[url])
        if not args.streams:
            show_memory(pids[url])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
