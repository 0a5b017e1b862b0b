"""The highest rate of arrivals at which a cluster keeps its promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cluster.scheduling.keys import SchedulingPolicy
from deploy.simulator.hardware import Model
from deploy.simulator.results import Misses, Outcome, Slo, Summary, keeps, summarise
from deploy.simulator.simulation import SCHEDULING, MakePolicy, Simulation
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.workload import Workload

PRECISION = 0.04  # of the rate
FACTOR = 1.25
MIN_RATE = 1e-3
MAX_LEAPS = 8
REACH = 64  # times the guess: no rate is looked for further away


def run_once(
    specs: Sequence[WorkerSpec],
    policy: MakePolicy,
    model: Model,
    workload: Workload,
    rate: float,
    num_requests: int,
    seed: int,
    slo: Slo,
    scheduling: SchedulingPolicy = SCHEDULING,
) -> Summary:
    simulation = Simulation(specs, [policy], model, seed, scheduling=scheduling)
    return summarise(simulation.run(workload.requests(rate, num_requests, seed)), slo)


def run_unless_missed(
    specs: Sequence[WorkerSpec], policy: MakePolicy, model: Model, workload: Workload, rate: float,
    num_requests: int, seed: int, slo: Slo,
) -> Summary | None:  # fmt: skip
    """Like `run_once`. None: the limits cannot be kept; the run ended when that was sure."""
    requests = list(workload.requests(rate, num_requests, seed))
    outcomes, misses, is_kept = [], Misses(requests, slo), True

    def note(are_too_many: bool) -> None:
        nonlocal is_kept
        if are_too_many:
            is_kept = False
            simulation.loop.stop()

    def note_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        note(misses.are_too_many(outcome))

    simulation = Simulation(
        specs, [policy], model, seed, on_outcome=note_outcome,
        on_first=lambda request, ttft_s: note(misses.are_too_many_late(request, ttft_s)),
    )  # fmt: skip
    simulation.run(requests)
    return summarise(outcomes, slo) if is_kept else None


def leapt(run: Callable[[float], Summary | None], slo: Slo, guess: float) -> float:
    """A better guess for `highest_rate`, which calls `run` with the same rates again: the last rate above the
    guess that it would find kept, by every second one first; or the guess itself. It saves runs at rates that
    are kept, which do not end early."""
    for _ in range(MAX_LEAPS):
        if not keeps(run(guess * FACTOR * FACTOR), slo):
            break
        guess = guess * FACTOR * FACTOR
    return guess * FACTOR if keeps(run(guess * FACTOR), slo) else guess


def rate_above(guess: float, least: float) -> float:
    """The lowest rate above `least`, and no lower than the guess, that `highest_rate` may return with this
    guess. If it is not kept, `highest_rate` would return less."""
    grain = FACTOR
    while grain > 1 + PRECISION:
        grain **= 0.5
    rate = guess
    while rate <= least:
        rate *= grain
    return rate


def highest_rate(
    run: Callable[[float], Summary | None], slo: Slo, guess: float, precision: float = PRECISION
) -> tuple[float, Summary | None]:
    """The rate at which the limits are just kept, and what came out there. (0, None): nowhere. Raises
    ValueError if they are kept at any rate, because too few requests are simulated.

    `run` simulates a rate; None: they are not kept there. The guess is bracketed by factors first, then
    halved in logarithms.
    """
    low, high, best, rate = 0.0, math.inf, None, guess
    while high > low * (1 + precision):
        summary = run(rate)
        if keeps(summary, slo):
            low, best = rate, summary
        else:
            high = rate
        if not low and rate < max(MIN_RATE, guess / REACH):
            break
        if high == math.inf and rate > guess * REACH:
            raise ValueError("so few requests keep the limits at any rate: simulate more")
        rate = low * FACTOR if high == math.inf else (low * high) ** 0.5 if low else high / FACTOR
    return low, best
