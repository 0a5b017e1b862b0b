"""How many devices of each kind to give to each phase: coarse by arithmetic, fine by simulation.

All ways to divide the devices are ranked by the rate of their narrowest phase (`demand.capacity`). The best
few are simulated; from the best of them one device at a time is given to another phase, as long as that
raises the rate that keeps the promise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from cluster.simulator.demand import capacity, demand
from cluster.simulator.hardware import ACCELERATORS, Model
from cluster.simulator.layouts import Layout, workers
from cluster.simulator.results import Slo, Summary
from cluster.simulator.search import highest_rate, run_once
from cluster.simulator.worker import WorkerSpec
from cluster.simulator.workload import Workload
from router.policy import make_policy

NUM_COARSE = 4  # divisions that are simulated before the fine search

Division = tuple[tuple[str, Layout], ...]  # (accelerator, its devices)


@dataclass(frozen=True)
class Plan:
    """`rate`: requests a second that keep the promise; `estimate`: what arithmetic alone said."""

    division: Division
    rate: float
    estimate: float
    summary: Summary | None

    @property
    def name(self) -> str:
        return ", ".join(f"{name}: {layout.name}" for name, layout in self.division)


def plan(
    workload: Workload, slo: Slo, devices: Mapping[str, int], model: Model, num_requests: int, seed: int = 0
) -> list[Plan]:
    """All divisions that were simulated, the best first. Raises ValueError where no division can serve the
    workload."""
    wanted = demand(workload)
    ranked = [(capacity(specs_of(each, model), wanted), each) for each in divisions(devices)]
    ranked = sorted((pair for pair in ranked if pair[0] > 0), key=lambda pair: -pair[0])
    if not ranked:
        raise ValueError("too few devices: every phase needs one")
    estimates = {division: estimate for estimate, division in ranked}
    found: dict[Division, Plan] = {}

    def simulated(division: Division) -> Plan:
        if division not in found:
            specs = specs_of(division, model)

            def run(rate: float) -> Summary:
                return run_once(
                    specs, lambda _: make_policy("joint"), model, workload, rate, num_requests, seed, slo
                )

            rate, summary = highest_rate(run, slo, 0.8 * estimates[division])
            found[division] = Plan(division, rate, estimates[division], summary)
        return found[division]

    best = max((simulated(division) for _, division in ranked[:NUM_COARSE]), key=lambda each: each.rate)
    while True:
        near = [each for each in neighbours(best.division) if each in estimates]
        better = max((simulated(each) for each in near), key=lambda each: each.rate, default=best)
        if better.rate <= best.rate:
            return sorted(found.values(), key=lambda each: -each.rate)
        best = better


def specs_of(division: Division, model: Model) -> list[WorkerSpec]:
    return [spec for name, layout in division for spec in workers(layout, model, ACCELERATORS[name])]


def divisions(devices: Mapping[str, int]) -> Iterator[Division]:
    """Every way to give each device to one phase; decode workers compute short prompts themselves where that
    is sooner."""
    choices = [
        [
            (name, Layout(encode, prefill, count - encode - prefill, may_prefill_locally=True))
            for encode in range(count + 1)
            for prefill in range(count + 1 - encode)
        ]
        for name, count in devices.items()
    ]
    return iter(product(*choices))


def neighbours(division: Division) -> Iterator[Division]:
    """One device works for another phase."""
    for place, (name, layout) in enumerate(division):
        counts = (layout.num_encode, layout.num_prefill, layout.num_decode)
        for source, target in product(range(3), repeat=2):
            if source == target or not counts[source]:
                continue
            moved = [count - (i == source) + (i == target) for i, count in enumerate(counts)]
            yield (
                *division[:place],
                (name, Layout(*moved, may_prefill_locally=True)),
                *division[place + 1 :],
            )
