"""Policies side by side on a live cluster of small processes: 2 encoders, 2 prefill and 2 decode workers, or
those that `--workers` names, and a door for each policy.

    python -m bench.router.live --out R.jsonl                     workers as fast as this CPU, which they share
    python -m bench.router.live --out R.jsonl --emulate           every call takes what a curve says: devices of their own
    python -m bench.router.live --out R.jsonl --record-for-simulator T.jsonl     emulated, and the trace to be replayed (see trace.py)
    python -m bench.router.live --out R.jsonl --emulate --workers encode=1,language=3
    python -m bench.router.live --table R.jsonl                   the tables only

Per phase (see loads.py) a closed loop finds out what the cluster can do; it is a door's warm-up, too. Then
repetitions of blocks: the same shapes at the same instants for every policy, in an order that rotates,
Poisson arrivals at `--load` of that capacity. Between blocks the cluster is idle. Every record is a block.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import records
from bench.arguments import end_on_signals, parser_of
from bench.records import Record
from bench.router import live_report
from bench.router.client import Answer
from bench.router.devices import EMULATED
from bench.router.driver import capacity, open_loop
from bench.router.loads import PHASES, SLOWDOWN, Composer, Phase, arrivals, first_shapes
from bench.router.policies import setting_of
from bench.router.trace import Trace
from bench.router.workers import Cluster, cluster, specs
from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs
from cluster.errors import ClusterError
from cluster.types.members import Role

POLICIES = ("joint", "least_loaded", "round_robin")
COUNTS = {Role.ENCODE: 2, Role.PREFILL: 2, Role.DECODE: 2}
CONCURRENCY = 24
NUM_TO_MEASURE = 100  # calls of a closed loop


def cluster_args(policy: str, **door: Any) -> ClusterArgs:
    """The arguments of a cluster whose door has that policy. Workers have one thread each."""
    args: dict[str, Any] = {
        "encode": {"threads": 1, "cache_bytes": 16 << 20},
        "prefill": {"threads": 1, "kv_blocks": 2048, "feature_bytes": 16 << 20},
        "decode": {"threads": 1, "kv_blocks": 4096},
        "door": {"policy": setting_of(policy), "show_workers": True, **door},
    }
    return resolve(ClusterArgs.model_validate(args), read_environment(), num_cores=1)


class Measurement:
    """Phases and repetitions on one running cluster."""

    def __init__(self, running: Cluster, options: argparse.Namespace, trace: Trace | None):
        self._running = running
        self._options = options
        self._trace = trace
        door = next(iter(running.doors.values()))
        args = cluster_args(options.policies[0])
        self._composer = Composer(args.model, door.models.model_id, options.seed)
        self._rates: dict[str, float] = {}
        self._slow: tuple[str, ...] = ()  # replica ids

    async def records(self) -> AsyncIterator[Record]:
        """Raises RuntimeError when a request fails or the cluster does not become idle."""
        for phase in self._options.phases:
            await self._measure_capacity(phase)
        for repetition in range(self._options.repeats):
            for phase in self._options.phases:
                if self._set_speeds(phase):
                    await self._settle(phase, repetition)
                for policy in rotated(self._options.policies, repetition):
                    yield await self._block(phase, policy, repetition)

    async def _measure_capacity(self, phase: Phase) -> None:
        self._set_speeds(phase)
        rates = []
        for policy, url in self._running.urls.items():
            shapes = first_shapes(phase, NUM_TO_MEASURE, "capacity")
            calls = self._composer.calls(shapes, [0.0] * len(shapes), phase.name, "capacity", policy)
            rates.append(await capacity(url, calls, CONCURRENCY))
            await self._be_idle()
        self._rates[phase.name] = self._options.load * max(rates)
        print(f"{phase.name}: {max(rates):.1f} requests a second at most", file=sys.stderr)

    async def _settle(self, phase: Phase, repetition: int) -> None:
        """Workers notice that their speed has changed, and every door hears of it, by a load that is not
        recorded."""
        shapes = first_shapes(phase, 2 * CONCURRENCY + 4, f"settle {repetition}")
        for policy, url in self._running.urls.items():
            calls = self._composer.calls(
                shapes, [0.0] * len(shapes), phase.name, "settle", repetition, policy
            )
            await capacity(url, calls, CONCURRENCY)
        await self._be_idle()

    async def _block(self, phase: Phase, policy: str, repetition: int) -> Record:
        rate = self._rates[phase.name]
        count = max(1, round(rate * self._options.block_s))
        seed = f"{self._options.seed} {repetition}"
        shapes = first_shapes(phase, count, seed)
        instants = arrivals(rate, count, random.Random(f"{phase.name} {seed} arrivals"))
        calls = self._composer.calls(shapes, instants, phase.name, repetition, policy)
        answers = await open_loop(self._running.urls[policy], calls)
        await self._be_idle()
        block = {
            "type": "live", "devices": devices_name(self._options), "phase": phase.name, "policy": policy,
            "repetition": repetition, "seed": self._options.seed, "requests_per_s": rate, "load": self._options.load,
            "workers": dict(self._options.workers),
        }  # fmt: skip
        if self._trace is not None:
            measured = await self._running.measured()
            more = {
                "slowdowns": dict.fromkeys(phase.slow, SLOWDOWN),
                "measured": msgspec.to_builtins(measured),
            }
            await self._trace.add(block | more, self._running.doors[policy], answers)
        return block | answer_fields(answers)

    def _set_speeds(self, phase: Phase) -> bool:
        """Whether a worker is as fast as it was no more."""
        has_changed = phase.slow != self._slow
        self._slow = phase.slow
        self._running.slow_down(dict.fromkeys(phase.slow, SLOWDOWN))
        return has_changed

    async def _be_idle(self) -> None:
        if held := await self._running.wait_idle():
            raise RuntimeError(f"the cluster still holds {held}")


def answer_fields(answers: Sequence[Answer]) -> Record:
    """Seconds to 0.1 ms, in the order of arrival. `placed_s`: from placing to the first token at the door,
    what was predicted. Raises RuntimeError for a request without an answer: then the others' times mean
    nothing."""
    for answer in answers:
        if answer.failure:
            raise RuntimeError(f"a request failed: {answer.failure}")
    predicted = [answer.predicted_s for answer in answers]
    fields: Record = {
        "kinds": [answer.call.kind for answer in answers],
        "ttfts_s": _rounded(answer.ttft_s for answer in answers),
    }
    if all(each is not None for each in predicted):
        expected, low, high = zip(*(each for each in predicted if each is not None), strict=True)
        fields |= {
            "placed_s": _rounded(answer.placed_ttft_s for answer in answers),
            "predicted_s": _rounded(expected),
            "low_s": _rounded(low),
            "high_s": _rounded(high),
        }
    return fields


def _rounded(values: Any) -> list[float]:
    return [round(value, 4) for value in values]


def rotated(names: Sequence[str], places: int) -> list[str]:
    places %= len(names)
    return [*names[places:], *names[:places]]


def devices_name(options: argparse.Namespace) -> str:
    return "emulated" if options.emulate else "real"


async def measure(options: argparse.Namespace) -> list[Record]:
    """Appends every record as soon as it is there; returns them all."""
    emulated = EMULATED if options.emulate else None
    doors: Mapping[str, ClusterArgs] = {policy: cluster_args(policy) for policy in options.policies}
    trace = None
    if options.record_for_simulator is not None:
        trace = Trace(options.record_for_simulator, EMULATED, next(iter(doors.values())), options.workers)
    found: list[Record] = []
    async with cluster(doors, specs(options.workers, emulated)) as running:
        async for record in Measurement(running, options, trace).records():
            found.append(record)
            records.append(options.out, [record])
    reports = [worker.report for worker in running.workers.values() if worker.report is not None]
    if options.emulate:
        ratio = sum(report.taken_s for report in reports) / sum(report.wanted_s for report in reports)
        print(f"emulated calls took {ratio:.2f} times as long as they should", file=sys.stderr)
    return found


def make_parser() -> argparse.ArgumentParser:
    by_name = {phase.name: phase for phase in PHASES}
    parser = parser_of(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="records are appended to it")
    where.add_argument("--table", type=Path, nargs="+", help="of records that are there")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--record-for-simulator", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=_counts, default=COUNTS, metavar="ROLE=COUNT,…")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument(
        "--phases", nargs="+", type=by_name.__getitem__, default=list(PHASES), metavar="|".join(by_name)
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block-s", type=float, default=8.0)
    parser.add_argument("--load", type=float, default=0.65)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def _counts(text: str) -> dict[Role, int]:
    return {Role(role): int(count) for role, count in (part.split("=") for part in text.split(","))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    end_on_signals()
    if options.record_for_simulator is not None and not options.workers.keys() <= COUNTS.keys():
        parser.error(f"recorded are workers of {', '.join(COUNTS)} alone")
    options.emulate |= options.record_for_simulator is not None
    try:
        found = records.read(options.table) if options.table else asyncio.run(measure(options))
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, TimeoutError, ClusterError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print("\n".join(live_report.tables(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
