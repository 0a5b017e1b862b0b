"""How many devices of each kind to give to each role: coarse by arithmetic, fine by simulation.

All ways to divide the devices are ranked by the rate of their narrowest phase (`demand.capacity`). That
arithmetic knows no limits of time, so it cannot say which roles are worth having: the best division of each
small set of roles is simulated. From the best of these one device at a time is given to another role, as long
as that makes a better division.

Of divisions with nearly the same rate the one with the fewest roles is the best. So a division is asked first
whether it keeps the rate with which it would be better than the best so far: one that is close, if it has
fewer roles, else a higher one. If it does not, its own rate is not looked for.
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
from deploy.simulator.search import highest_rate, leapt, rate_above, run_unless_missed
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
    starts = _starts(estimates)
    number = num_requests or min(max(int(LASTS_S * ranked[0][0]), LEAST_REQUESTS), MOST_REQUESTS)

    @cache
    def run(division: Division, rate: float) -> Summary | None:
        specs, policy = specs_of(division, model), make_policy("joint")
        return run_unless_missed(specs, lambda _: policy, model, workload, rate, number, seed, slo)

    def simulate(division: Division) -> None:
        known, (close, needed) = found.get(division), _needed(division, found)
        # of less than was needed before nothing is known
        if known is not None and not (known.is_limit and known.rate > needed):
            return
        estimate, needed_or_more = estimates[division], needed * (1 + 1e-9)

        def at(rate: float) -> Summary | None:
            """A division that keeps what was needed keeps less, too."""
            return run(division, rate if rate > needed_or_more else needed)

        if needed and not keeps(at(needed), slo):
            found[division] = Plan(division, needed, estimate, None, is_limit=True)
        else:
            rate, summary = highest_rate(at, slo, close or leapt(at, slo, 0.8 * estimate))
            found[division] = Plan(division, rate, estimate, summary)

    for division in starts:
        simulate(division)
    while True:
        best = _fastest(found)
        least = HOPE * estimates[best.division]
        near = [each for each in neighbours(best.division) if estimates.get(each, 0.0) >= least]
        for division in starts + near:
            simulate(division)
        if _fastest(found) is best:
            return _ranked(found)


def _needed(division: Division, found: Mapping[Division, Plan]) -> tuple[float, float]:
    """The least rate that is close to the best, and the one with which this division would be better than the
    best; zeros if none was found."""
    close = _close(found)
    if not close:
        return 0.0, 0.0
    best = _ranked(found)[0]
    num_more = len(_roles(division)) - len(_roles(best.division))
    least = 0.0 if num_more < 0 else _fastest(found).rate if num_more else best.rate
    return close, rate_above(close, least)


def _starts(ranked: Iterable[Division]) -> list[Division]:
    """The best division of each small set of roles, of all by their rank."""
    starts: dict[frozenset[str], Division] = {}
    for division in ranked:
        starts.setdefault(_roles(division), division)
    return [division for roles, division in starts.items() if len(roles) <= MAX_ROLES]


def _roles(division: Division) -> frozenset[str]:
    return frozenset(kind for _, layout in division for kind, count in layout.counts.items() if count)


def _fastest(found: Mapping[Division, Plan]) -> Plan:
    return max(found.values(), key=lambda each: (not each.is_limit, each.rate))


def _close(found: Mapping[Division, Plan]) -> float:
    """The least rate that is close to the highest one; 0 if none was found."""
    return (1 - TIE) * _fastest(found).rate if found else 0.0


def _ranked(found: Mapping[Division, Plan]) -> list[Plan]:
    """The plans by rate; the simplest of those that are close to the best goes first."""
    close = _close(found)

    def place(each: Plan) -> tuple[bool, int, float]:
        is_close = each.rate >= close and not each.is_limit
        return (not is_close, len(_roles(each.division)) * is_close, -each.rate)

    return sorted(found.values(), key=place)


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
