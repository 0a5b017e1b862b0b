"""How many devices of each kind to give to each role: coarse by arithmetic, fine by simulation.

All ways to divide the devices are ranked by the rate of their narrowest phase (`demand.capacity`). That
arithmetic knows no limits of time, so it cannot say which roles are worth having: the best division of each
small set of roles is simulated. From the best of these one device at a time is given to another role, as long
as that raises the rate that keeps the promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, product

from deploy.simulator.demand import capacity, demand
from deploy.simulator.hardware import ACCELERATORS, Model
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import Slo, Summary, keeps
from deploy.simulator.search import highest_rate, leapt, run_unless_missed
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.workload import Workload
from router.policy import make_policy

MAX_ROLES = 3  # of a division that is simulated before the fine search
NUM_ROLES = 5  # E, P, D, PD and EPD: the first fields of a layout
TIE = 0.03  # of the best rate: of divisions so close, the one with the fewest roles is the best
LASTS_S = 30  # of requests that arrive: some times as long as an answer of a large model takes
LEAST_REQUESTS, MOST_REQUESTS = 400, 1500
HOPE = 0.8  # of the best division's capacity by arithmetic: a division with less is not simulated

Division = tuple[tuple[str, Layout], ...]  # (accelerator, its devices)


@dataclass(frozen=True)
class Plan:
    """`rate`: requests a second that keep the promise; `estimate`: what arithmetic alone said. `is_limit`:
    the rate is not kept; less was not simulated, because another division keeps more."""

    division: Division
    rate: float
    estimate: float
    summary: Summary | None
    is_limit: bool = False

    @property
    def name(self) -> str:
        return ", ".join(f"{name}: {layout.name}" for name, layout in self.division)


def plan(
    workload: Workload,
    slo: Slo,
    devices: Mapping[str, int],
    model: Model,
    num_requests: int | None = None,
    seed: int = 0,
) -> list[Plan]:
    """All divisions that were simulated, the best first. num_requests: None: as many as arrive in `LASTS_S`
    at the rate that arithmetic promises, within bounds. Raises ValueError where no division can serve the
    workload."""
    wanted = demand(workload)
    ranked = [(capacity(specs_of(each, model), wanted), each) for each in divisions(devices)]
    ranked = sorted((pair for pair in ranked if pair[0] > 0), key=lambda pair: -pair[0])
    if not ranked:
        raise ValueError("too few devices: every phase needs one that has room for the model")
    estimates = {division: estimate for estimate, division in ranked}
    found: dict[Division, Plan] = {}
    number = num_requests or min(max(int(LASTS_S * ranked[0][0]), LEAST_REQUESTS), MOST_REQUESTS)

    def simulate(division: Division) -> None:
        if division in found:
            return
        specs, estimate = specs_of(division, model), estimates[division]

        @cache
        def run(rate: float) -> Summary | None:
            policy = make_policy("joint")
            return run_unless_missed(specs, lambda _: policy, model, workload, rate, number, seed, slo)

        close = (1 - TIE) * _best(found).rate if found else 0.0
        if close and not keeps(run(close), slo):
            found[division] = Plan(division, close, estimate, None, is_limit=True)
        else:
            rate, summary = highest_rate(run, slo, close or leapt(run, slo, 0.8 * estimate))
            found[division] = Plan(division, rate, estimate, summary)

    for division in _starts(estimates):
        simulate(division)
    while True:
        best = _best(found)
        least = HOPE * estimates[best.division]
        for division in neighbours(best.division):
            if estimates.get(division, 0.0) >= least:
                simulate(division)
        if _best(found) is best:
            return _ranked(list(found.values()), best.rate * (1 - TIE))


def _best(found: Mapping[Division, Plan]) -> Plan:
    return max(found.values(), key=lambda each: (not each.is_limit, each.rate))


def _starts(ranked: Iterable[Division]) -> list[Division]:
    """The best division of each small set of roles, of all by their rank."""
    starts: dict[frozenset[str], Division] = {}
    for division in ranked:
        starts.setdefault(_roles(division), division)
    return [division for roles, division in starts.items() if len(roles) <= MAX_ROLES]


def _roles(division: Division) -> frozenset[str]:
    return frozenset(kind for _, layout in division for kind, count in layout.counts.items() if count)


def _ranked(plans: list[Plan], close: float) -> list[Plan]:
    """The plans by rate; the simplest of those that are close to the best goes first."""

    def place(each: Plan) -> tuple[bool, int, float]:
        is_close = each.rate >= close and not each.is_limit
        return (not is_close, len(_roles(each.division)) * is_close, -each.rate)

    return sorted(plans, key=place)


def specs_of(division: Division, model: Model) -> list[WorkerSpec]:
    return [spec for name, layout in division for spec in workers(layout, model, ACCELERATORS[name])]


def divisions(devices: Mapping[str, int]) -> Iterator[Division]:
    """Every way to give each device one role; decode workers compute short prompts themselves where that is
    sooner."""
    return product(*([(name, each) for each in _layouts(count)] for name, count in devices.items()))


def _layouts(num_devices: int) -> Iterator[Layout]:
    num_places = num_devices + NUM_ROLES - 1
    for bars in combinations(range(num_places), NUM_ROLES - 1):
        ends = (-1, *bars, num_places)
        counts = (end - begin - 1 for begin, end in pairwise(ends))
        yield Layout(*counts, may_prefill_locally=True)


def neighbours(division: Division) -> Iterator[Division]:
    """One device has another role."""
    for place, (name, layout) in enumerate(division):
        counts = (
            layout.num_encode,
            layout.num_prefill,
            layout.num_decode,
            layout.num_language,
            layout.num_whole,
        )
        for source, target in product(range(NUM_ROLES), repeat=2):
            if source == target or not counts[source]:
                continue
            moved = [count - (i == source) + (i == target) for i, count in enumerate(counts)]
            yield (
                *division[:place],
                (name, Layout(*moved, may_prefill_locally=True)),
                *division[place + 1 :],
            )
