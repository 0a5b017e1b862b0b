"""A door with admission at several times what its cluster can do: which requests are answered in time, which
are refused, and whether every one is accounted for.

    python -m bench.router.overload --out R.jsonl [--factors 1 3] [--requests 1000]

Emulated workers (see devices.py), text and images, two classes and two API keys, one of which sends ten times
as much as the other. A closed loop through a door with the default settings finds the capacity; then an open
loop at each factor of it. Every request must be answered or refused with 429 and Retry-After; afterwards the
cluster holds nothing. Exit status 1 if any of that is not so.

Goodput: answers whose first token came within their class's target, a second, while requests came.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import records
from bench.arguments import end_on_signals, parser_of
from bench.metrics import samples
from bench.records import Record
from bench.router.client import Answer, Call
from bench.router.devices import EMULATED
from bench.router.driver import capacity, open_loop
from bench.router.live import CONCURRENCY, COUNTS, NUM_TO_MEASURE, cluster_args
from bench.router.loads import PHASES, Composer, arrivals, first_shapes
from bench.router.workers import Cluster, cluster, specs
from bench.tables import head, row
from cluster.errors import ClusterError
from deploy.simulator.results import percentile

# Of all workers: the door and the clients share one process, which must keep up at three times the capacity.
SLOWDOWN = 2.0
HEAVY_SHARE = 10 / 11  # of all requests come with the key "heavy"
BATCH_SHARE = 0.5
MOST_LATE_S = 0.5  # beyond its class's limit that a wait may be measured
CONTENT = "balanced"
NUM_AT_ONE = 300  # requests at a factor of one and below
WARM_UP_LOAD = 0.7  # of the capacity
LIMITED, UNLIMITED = "limited", "unlimited"  # doors
FINISHED = "epdg_requests_total"


@dataclass(frozen=True)
class Class:
    """A class as the door's settings name it."""

    name: str
    priority: int
    max_wait_s: float
    target_ttft_s: float
    weight: float


CLASSES = (Class("interactive", 0, 2.0, 2.5, 8.0), Class("batch", 1, 10.0, 12.0, 1.0))


@dataclass(frozen=True)
class Sender:
    """The sender of one request."""

    key: str
    of_class: Class

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


def admission_settings(classes: Sequence[Class]) -> dict[str, Any]:
    """`door.admission`: the last class has no upper bound."""
    return {
        "classes": [
            {
                "name": each.name,
                "max_priority": None if each is classes[-1] else each.priority,
                "max_wait_s": each.max_wait_s,
                "target_ttft_s": each.target_ttft_s,
                "weight": each.weight,
            }
            for each in classes
        ]
    }


def draw_senders(count: int, rng: random.Random) -> list[Sender]:
    return [
        Sender("heavy" if rng.random() < HEAVY_SHARE else "light", CLASSES[int(rng.random() < BATCH_SHARE)])
        for _ in range(count)
    ]


def summary(sent: Sequence[tuple[Sender, Answer]], window_s: float) -> Record:
    """A record of a load whose requests came within `window_s`, and of each key and class in it."""
    groups = {
        f"{key} {each.name}": [(s, a) for s, a in sent if s.key == key and s.of_class is each]
        for key in ("heavy", "light")
        for each in CLASSES
    }
    parts = {name: group_fields(group, window_s, _start(sent)) for name, group in groups.items()}
    return {**group_fields(sent, window_s, _start(sent)), "groups": parts}


def group_fields(sent: Sequence[tuple[Sender, Answer]], window_s: float, started_at: float) -> Record:
    """A request is in exactly one of answered, refused and failed."""
    answered = [(sender, answer) for sender, answer in sent if not answer.failure]
    refused = [answer for _, answer in sent if answer.was_refused]
    failures = Counter(a.failure for _, a in sent if a.failure and not a.was_refused)
    good = [
        answer
        for sender, answer in answered
        if answer.ttft_s <= sender.of_class.target_ttft_s
        and answer.started_at + answer.ttft_s <= started_at + window_s
    ]
    waits_s = [answer.stage_ms("admission") / 1e3 for _, answer in answered]
    ttfts_s = [answer.ttft_s for _, answer in answered]
    return {
        "requests": len(sent),
        "answered": len(answered),
        "refused": len(refused),
        "refused_without_retry_after": sum(answer.retry_after_s is None for answer in refused),
        "failed": failures.total(),
        "failures": list(failures)[:3],
        "goodput": round(len(good) / window_s, 3),
        "ttft_p50_s": round(percentile(ttfts_s, 0.5), 4),
        "ttft_p99_s": round(percentile(ttfts_s, 0.99), 4),
        "wait_p50_s": round(percentile(waits_s, 0.5), 4),
        "wait_max_s": round(max(waits_s, default=0.0), 4),
        "waited_too_long": sum(
            wait_s > sender.of_class.max_wait_s + MOST_LATE_S
            for (sender, _), wait_s in zip(answered, waits_s, strict=True)
        ),
        "refusals": dict(Counter(answer.failure for answer in refused).most_common(4)),
        "retry_after_s": _range(
            [answer.retry_after_s for answer in refused if answer.retry_after_s is not None]
        ),
    }


def faults(record: Record) -> list[str]:
    """What must not be in a record of any load."""
    forgotten = record["requests"] - record["answered"] - record["refused"] - record["failed"]
    counts = {
        "requests without an end": forgotten,
        "requests that failed": record["failed"],
        "refusals without Retry-After": record["refused_without_retry_after"],
        "requests that waited beyond their class's limit": record["waited_too_long"],
        "answers that the door does not know of, or the client": record["answered"] - record["door_answered"],
        "things held afterwards": len(record["held"]),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def finished(metrics: str) -> Counter[str]:
    """Choices that ended at a door, by reason."""
    return Counter({each.labels["finished_reason"]: int(each.value) for each in samples(metrics, FINISHED)})


async def measure(options: argparse.Namespace) -> AsyncIterator[Record]:
    args = cluster_args("joint", admission=admission_settings(CLASSES))
    doors = {LIMITED: args, UNLIMITED: cluster_args("joint")}
    async with cluster(doors, specs(COUNTS, EMULATED)) as running:
        running.slow_down(dict.fromkeys(running.workers, SLOWDOWN))
        composer = Composer(args.model, args.model_id, options.seed)
        most = await _capacity(running, composer, options.seed)
        print(f"{most:.1f} requests a second at most", file=sys.stderr)
        peak = 0.0
        for factor in sorted(options.factors):
            count = options.requests if factor > 1 else NUM_AT_ONE
            record = await _load(running, composer, factor * most, count, options.seed)
            peak = max(peak, record["goodput"])
            yield {
                "type": "overload", "devices": "emulated", "factor": factor, "capacity": most, **record,
                "of_peak": round(record["goodput"] / peak, 3) if peak else 0.0,
            }  # fmt: skip


async def _capacity(running: Cluster, composer: Composer, seed: int) -> float:
    """Answers a second at most, by a door that refuses no request. Then the door that is measured learns how
    fast its workers are."""
    shapes = first_shapes(_phase(), NUM_TO_MEASURE, "capacity")
    rate = 0.0
    for turn in range(2):  # in the first one the door learns how fast the workers are
        calls = composer.calls(shapes, [0.0] * len(shapes), "capacity", turn)
        rate = max(rate, await capacity(running.urls[UNLIMITED], calls, CONCURRENCY))
        await running.wait_idle()
    instants = arrivals(WARM_UP_LOAD * rate, len(shapes), random.Random(f"warm-up {seed}"))
    await open_loop(running.urls[LIMITED], composer.calls(shapes, instants, "warm-up"))
    await running.wait_idle()
    return rate


async def _load(running: Cluster, composer: Composer, rate: float, count: int, seed: int) -> Record:
    rng = random.Random(f"overload {seed}")
    senders, instants = draw_senders(count, rng), arrivals(rate, count, rng)
    shapes = first_shapes(_phase(), count, seed)
    calls = composer.calls(shapes, instants, "overload", rate, seed)
    calls = [sent_by(sender, call) for sender, call in zip(senders, calls, strict=True)]
    before = finished(running.doors[LIMITED].metrics().decode())
    answers = await open_loop(running.urls[LIMITED], calls)
    held = await running.wait_idle()
    ended = finished(running.doors[LIMITED].metrics().decode()) - before
    record = summary(list(zip(senders, answers, strict=True)), instants[-1])
    return record | {
        "offered": round(count / instants[-1], 3),
        "door_finished": dict(ended),
        "door_answered": ended["length"] + ended["stop"],
        "held": held,
    }


def sent_by(sender: Sender, call: Call) -> Call:
    """The priority is one more field of the body."""
    body = b'{"priority":%d,%b' % (sender.of_class.priority, call.body[1:])
    return replace(call, body=body, headers=sender.headers)


def _phase() -> Any:
    return next(phase for phase in PHASES if phase.name == CONTENT)


def _start(sent: Sequence[tuple[Sender, Answer]]) -> float:
    """The instant at which the first request was sent."""
    return min((answer.started_at for _, answer in sent), default=0.0)


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)] if values else []


def table(found: Sequence[Record]) -> list[str]:
    """Markdown: a line for each load and each group in it."""
    columns: dict[str, Callable[[Record], str]] = {
        "requests": lambda r: str(r["requests"]),
        "answered": lambda r: str(r["answered"]),
        "refused": lambda r: str(r["refused"]),
        "goodput, 1/s": lambda r: f"{r['goodput']:.1f}",
        "TTFT p50, s": lambda r: f"{r['ttft_p50_s']:.2f}",
        "TTFT p99, s": lambda r: f"{r['ttft_p99_s']:.2f}",
        "wait p50, s": lambda r: f"{r['wait_p50_s']:.2f}",
        "longest wait, s": lambda r: f"{r['wait_max_s']:.2f}",
        "Retry-After, s": lambda r: " to ".join(f"{value:.0f}" for value in r["retry_after_s"]),
    }
    lines = head("load", "requests of", *columns)
    for record in found:
        for name, part in {"all": record, **record["groups"]}.items():
            cells = (make(part) for make in columns.values())
            lines.append(row([f"{record['factor']:g} x {record['capacity']:.1f}", name, *cells]))
    return lines


async def run(options: argparse.Namespace) -> int:
    found, wrong = [], []
    async for record in measure(options):
        records.append(options.out, [record])
        found.append(record)
        wrong += [f"at {record['factor']:g} times the capacity: {fault}" for fault in faults(record)]
    print("\n".join([*table(found), *wrong]))
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="records are appended to it")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 3.0], help="of the capacity")
    parser.add_argument("--requests", type=int, default=1000, help="of a load above the capacity")
    parser.add_argument("--seed", type=int, default=1)
    end_on_signals()
    try:
        return asyncio.run(run(parser.parse_args(arguments)))
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, TimeoutError, ClusterError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
