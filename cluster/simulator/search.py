"""The highest rate of arrivals at which a cluster keeps its promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.simulator.hardware import Model
from cluster.simulator.results import Slo, Summary, keeps, summarise
from cluster.simulator.simulation import MakePolicy, Simulation
from cluster.simulator.worker import WorkerSpec
from cluster.simulator.workload import Workload

PRECISION = 0.04  # of the rate
MIN_RATE = 1e-3


def run_once(
    specs: Sequence[WorkerSpec],
    policy: MakePolicy,
    model: Model,
    workload: Workload,
    rate: float,
    num_requests: int,
    seed: int,
    slo: Slo,
) -> Summary:
    simulation = Simulation(specs, [policy], model, seed)
    return summarise(simulation.run(workload.requests(rate, num_requests, seed)), slo)


def highest_rate(
    run: Callable[[float], Summary], slo: Slo, guess: float, precision: float = PRECISION
) -> tuple[float, Summary | None]:
    """Where the limits are just kept, and what came out there. (0, None): nowhere.

    `run` simulates a rate. The guess is bracketed by factors first, then halved in logarithms.
    """
    low, high, best, factor = 0.0, 0.0, None, 1.25
    rate = guess
    while not (low and high):
        summary = run(rate)
        if keeps(summary, slo):
            low, best = rate, summary
            rate *= factor
        else:
            high = rate
            rate /= factor
        if rate < MIN_RATE or rate < guess / 64:
            return 0.0, None
    while high / low > 1 + precision:
        rate = (low * high) ** 0.5
        summary = run(rate)
        if keeps(summary, slo):
            low, best = rate, summary
        else:
            high = rate
    return low, best
