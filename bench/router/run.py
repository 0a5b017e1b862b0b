"""Runs cases in a few processes and gives a record for each, as soon as it is there. A record follows from
its case alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context

from bench.records import Record
from bench.router.cases import (
    GROUP_SPLITS,
    SCENARIOS,
    SLOS,
    SPLITS,
    Case,
    GroupCase,
    OverloadCase,
    PolicyCase,
    SplitCase,
    names,
)
from bench.router.policies import maker
from bench.router.simulated_overload import overload
from cluster.scheduling.keys import SchedulingPolicy
from deploy.simulator.demand import capacity, demand
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import Slo, Summary, fields
from deploy.simulator.search import highest_rate, run_once
from deploy.simulator.simulation import SCHEDULING
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.workload import WORKLOADS

NO_LIMIT = Slo(float("inf"))
SPLIT_PRECISION = 0.06
ARRIVALS = 24  # a run lasts so many times as long as a first token may take
LEAST_PAUSE_S = 1e-3
GUESSES = {"1 s, 25 ms": 0.6, "1 s, 30 ms": 0.75, "2 s, 100 ms": 1.0}  # of what arithmetic says


def run(cases: Sequence[Case], num_processes: int) -> Iterator[Record]:
    with get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(record, cases)


def record(case: Case) -> Record:
    began_s = time.process_time()
    match case:
        case PolicyCase():
            found = fields(_policy(case))
        case SplitCase():
            found = _split(case)
        case GroupCase():
            found = fields(_group(case))
        case OverloadCase():
            found = overload(case)
    took = {"cpu_s": round(time.process_time() - began_s, 2)}
    return names(case) | {"seed": case.seed} | found | took


def _policy(case: PolicyCase) -> Summary:
    scenario = SCENARIOS[case.scenario]
    return run_once(
        scenario.specs(),
        maker(case.policy),
        scenario.model,
        WORKLOADS[scenario.workload],
        scenario.rate,
        case.num_requests,
        case.seed,
        NO_LIMIT,
    )


def _split(case: SplitCase) -> Record:
    split, slo, workload = SPLITS[case.split], SLOS[case.slo], WORKLOADS[case.workload]
    specs = workers(split.layout, case.model, case.accelerator)
    scheduling = promised(slo, specs)

    def simulate(rate: float) -> Summary:
        num_requests = max(case.min_requests, int(ARRIVALS * slo.ttft_s * rate))
        return run_once(
            specs, maker(split.policy), case.model, workload, rate, num_requests, case.seed, slo, scheduling
        )

    busy = capacity(workers(Layout(num_whole=4), case.model, case.accelerator), demand(workload))
    rate, summary = highest_rate(simulate, slo, GUESSES[case.slo] * busy, SPLIT_PRECISION)
    return {"rate": round(rate, 3), "most": round(most(case), 2)} | (fields(summary) if summary else {})


def promised(slo: Slo, specs: Sequence[WorkerSpec]) -> SchedulingPolicy:
    """What a cluster that promises these limits is set to: prompts lengthen a step of answers to no more than
    a token may take."""
    fixed_s = max(
        (spec.curves.decode.fixed_s for spec in specs if spec.curves.decode is not None), default=0.0
    )
    pause_s = max(LEAST_PAUSE_S, slo.tpot_s - fixed_s)
    return replace(SCHEDULING, prompt_pause_s=min(SCHEDULING.prompt_pause_s, pause_s))


def most(case: SplitCase) -> float:
    """Requests a second that the time of four devices allows, whatever runs where: what must be computed,
    with all that is read for it hidden."""
    wanted = demand(WORKLOADS[case.workload])
    (whole,) = workers(Layout(num_whole=1), case.model, case.accelerator)
    prefill, decode = whole.curves.prefill, whole.curves.decode
    assert whole.encoder is not None and prefill is not None and decode is not None
    seconds = wanted.num_rows * next(iter(whole.encoder.encode.values())).per_unit_s
    seconds += wanted.num_tokens * prefill.per_unit_s + wanted.num_output_tokens * decode.per_unit_s
    return 4 / seconds


def _group(case: GroupCase) -> Summary:
    layout, policy = GROUP_SPLITS[case.split]
    return run_once(
        workers(layout, case.model, case.accelerator),
        maker(policy),
        case.model,
        WORKLOADS["grouped"],
        case.rate,
        case.num_requests,
        case.seed,
        NO_LIMIT,
    )
