"""What is simulated: frozen values, each one run, or one search, with one seed. The figures for them stand
in README.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.router.policies import ORACLE, WHOLE, WHOLE_IN_TURN
from deploy.simulator.hardware import A100, H200, H200_PAIR, VL_7B, VL_32B, Accelerator, Model
from deploy.simulator.layouts import Layout, throttled, workers
from deploy.simulator.results import Slo
from deploy.simulator.spec import WorkerSpec

POLICY_NAMES = ("joint", "round_robin", "least_loaded", "linear", "per_stage", ORACLE)


@dataclass(frozen=True)
class Scenario:
    """A cluster, a workload and a rate of arrivals at which the narrowest phase is busy for about 0.6 to 0.8
    of the time."""

    name: str
    specs: Callable[[], list[WorkerSpec]] = field(repr=False)
    workload: str
    rate: float
    model: Model = VL_7B


def _h200(*counts: int, may_prefill_locally: bool = False) -> Callable[[], list[WorkerSpec]]:
    return lambda: workers(Layout(*counts, may_prefill_locally=may_prefill_locally), VL_7B, H200)


def _mixed_kinds() -> list[WorkerSpec]:
    fast = workers(Layout(1, 2, 1), VL_7B, H200)
    return fast + workers(Layout(2, 4, 1), VL_7B, A100, first=len(fast))


def _one_slow() -> list[WorkerSpec]:
    specs = workers(Layout(0, 6, 2), VL_7B, H200)
    return throttled(specs, "p:h200-0", since=0.0, factor=3.0)


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("text", _h200(0, 6, 2), "text", 95),
        Scenario("bursts of text", _h200(0, 6, 2), "bursty-text", 80),
        Scenario("short text, may stay", _h200(0, 3, 3, may_prefill_locally=True), "text-400", 150),
        Scenario("1 image", _h200(2, 5, 2), "1-image", 130),
        Scenario("4 images", _h200(3, 6, 2), "4-image", 75),
        Scenario("videos among text", _h200(2, 5, 2), "video-mix", 150),
        Scenario("turns", _h200(1, 5, 2), "multi-turn", 220),
        Scenario("groups", _h200(2, 4, 4), "grouped", 40),
        Scenario("two kinds of GPU", _mixed_kinds, "1-image", 75),
        Scenario("one slow worker", _one_slow, "text", 75),
    )
}


@dataclass(frozen=True)
class PolicyCase:
    scenario: str
    policy: str
    seed: int
    num_requests: int = 2000


# Of TTFT and TPOT, kept by 90 % of the requests: balanced, tight and loose. With the default `prompt_pause_s`
# data parallelism and a phase each serve images about equally at the balanced ones, and a phase each serves
# more at the tight ones; `bench.router.run.promised` sets it for each.
SLOS = {
    "1 s, 30 ms": Slo(1.0, 0.03, share=0.9),
    "1 s, 25 ms": Slo(1.0, 0.025, share=0.9),
    "2 s, 100 ms": Slo(2.0, 0.1, share=0.9),
}
SPLIT_WORKLOADS = ("text", "1-image", "4-image", "video-mix", "multi-turn")


class Family(StrEnum):
    """What the workers of a split may do of a request."""

    WHOLE = "all"
    PHASES = "a phase"
    ANY = "any"


@dataclass(frozen=True)
class Split:
    """How four devices are used."""

    name: str
    family: Family
    layout: Layout
    policy: str = "joint"


SPLITS = {
    each.name: each
    for each in (
        Split("4 EPD, each request on one", Family.WHOLE, Layout(num_whole=4), WHOLE),
        Split("1 E, 2 P, 1 D", Family.PHASES, Layout(1, 2, 1)),
        Split("2 P, 2 D", Family.PHASES, Layout(0, 2, 2)),
        Split("4 EPD, joint", Family.ANY, Layout(num_whole=4)),
    )
}


@dataclass(frozen=True)
class SplitCase:
    """A search for the highest rate that keeps the promise."""

    workload: str
    split: str
    slo: str
    seed: int
    accelerator: Accelerator = A100
    model: Model = VL_7B
    min_requests: int = 100


@dataclass(frozen=True)
class GroupCase:
    """llm-d's groups: eight pairs of H200, a 32B model."""

    policy: str
    split: str
    rate: float
    seed: int
    num_requests: int = 3000
    accelerator: Accelerator = H200_PAIR
    model: Model = VL_32B


GROUP_SPLITS = {
    "8 EPD, in turn": (Layout(num_whole=8), WHOLE_IN_TURN),
    "8 EPD, joint": (Layout(num_whole=8), "joint"),
    "1 E, 3 P, 4 D, in turn": (Layout(1, 3, 4), "round_robin"),
    "1 E, 3 P, 4 D, joint": (Layout(1, 3, 4), "joint"),
}
GROUP_RATES = (15.0, 20.0, 25.0, 30.0)


@dataclass(frozen=True)
class OverloadCase:
    """Arrivals at so many times what the cluster serves, with the admission queue or without. `layout`: its
    name."""

    load: float
    has_admission: bool
    seed: int
    arrivals_s: float = 40.0
    layout: str = "1E+4P+2D"


OVERLOAD_LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(1, 4, 2),
        Layout(num_encode=1, num_language=6),
        Layout(num_encode_prefill=5, num_decode=2),
        Layout(num_whole=7),
    )
}

Case = PolicyCase | SplitCase | GroupCase | OverloadCase
NUM_SEEDS = 5


def all_cases(num_seeds: int = NUM_SEEDS, first_seed: int = 0) -> list[Case]:
    """The cases, those that take longest first."""
    seeds = range(first_seed, first_seed + num_seeds)
    cases: list[Case] = [
        SplitCase(workload, split.name, slo, seed)
        for slo in SLOS
        for seed in seeds
        for workload in SPLIT_WORKLOADS
        for split in SPLITS.values()
        if split.layout.num_whole or (split.layout.num_encode > 0) is (workload != "text")
    ]
    cases += [
        PolicyCase(name, policy, seed) for name in SCENARIOS for policy in POLICY_NAMES for seed in seeds
    ]
    cases += [
        GroupCase(policy, name, rate, seed)
        for name, (_, policy) in GROUP_SPLITS.items()
        for rate in GROUP_RATES
        for seed in seeds
    ]
    cases += [
        OverloadCase(load, has_admission, seed, layout=layout)
        for layout in OVERLOAD_LAYOUTS
        for load in (0.75, 1.0, 2.0, 3.0)
        for has_admission in (True, False)
        for seed in seeds
        if has_admission or layout == OverloadCase.layout
    ]
    return cases


def names(case: Case) -> dict[str, Any]:
    """What distinguishes a case from others of its kind, for its record."""
    match case:
        case PolicyCase():
            return {"type": "policies", "scenario": case.scenario, "policy": case.policy}
        case SplitCase():
            return {"type": "splits", "workload": case.workload, "split": case.split, "slo": case.slo}
        case GroupCase():
            return {"type": "groups", "split": case.split, "rate": case.rate}
        case OverloadCase():
            return {
                "type": "overload", "layout": case.layout, "load": case.load, "admission": case.has_admission
            }  # fmt: skip
