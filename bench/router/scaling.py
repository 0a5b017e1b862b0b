"""Scaling of all pools together, simulated: a day that swings between text and video (`day`), by pools that
are scaled and by fixed pools. See README.md.

A violation is a request that did not get its first token or its tokens in time, or was refused. The fixed
pools are the strongest that could be had: for each number of devices, of the divisions that arithmetic over
the known rates of the day likes best, the one with the fewest violations on the very traffic of the first
seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import fmean
from typing import Any

from bench.router.day import HOUR_S, TEXT, VIDEO, day, text_draft, video_draft
from bench.router.scaled_pools import Bounds, ScaledPools
from bench.tables import head
from cluster.config.settings import AdmissionArgs
from deploy.simulator.demand import Demand, seconds
from deploy.simulator.hardware import A100, VL_7B
from deploy.simulator.layouts import ROLES, Layout, worker, workers
from deploy.simulator.results import Outcome, interval
from deploy.simulator.simulation import Simulation
from router.policy import make_policy
from router.scaling import Scaler, ScalingSettings

LETTERS = {role: letters for letters, role in ROLES.items()}
START = Layout(1, 2, 1)  # of the pools that are scaled
NUM_CANDIDATES = 3  # divisions of so many devices that are simulated
TTFT_S, TPOT_S = 4.0, 0.08
# A replica starts in 10 s, which is 10 minutes of the day that is simulated
SETTINGS = ScalingSettings(target_ttft_s=TTFT_S, target_tpot_s=TPOT_S, start_s=10.0, drain_s=10.0)


@dataclass(frozen=True)
class Run:
    """`layout`: at the start, and for good if `is_scaled` is false."""

    layout: Layout
    seed: int
    is_scaled: bool
    hour_s: float = HOUR_S
    settings: ScalingSettings = SETTINGS


def simulate(run: Run) -> dict[str, Any]:
    specs = workers(run.layout, VL_7B, A100)
    simulation = Simulation(
        specs, [lambda _: make_policy("joint")], VL_7B, run.seed, admission=AdmissionArgs()
    )
    numbers = count(len(specs))
    pools = ScaledPools(
        simulation,
        Scaler(run.settings) if run.is_scaled else None,
        {spec.role: Bounds(1, 16) for spec in specs},
        lambda role: worker(LETTERS[role], f"{A100.name}-{next(numbers)}", run.layout, VL_7B, A100),
    )
    outcomes = simulation.run(day(run.seed, run.hour_s))
    late = sum(is_late(outcome) for outcome in outcomes)
    return {
        "type": "scaling",
        "layout": run.layout.name,
        "is_scaled": run.is_scaled,
        "seed": run.seed,
        "num_requests": len(outcomes),
        "num_violations": late,
        "num_refused": sum(outcome.status == "refused" for outcome in outcomes),
        "num_failed": sum(outcome.status == "failed" for outcome in outcomes),
        "num_late_videos": sum(is_late(outcome) and outcome.request.kind == "video" for outcome in outcomes),
        "mean_devices": round(pools.device_seconds() / simulation.loop.now, 3),
        "num_changes": len(pools.changes),
    }


def is_late(outcome: Outcome) -> bool:
    return outcome.status != "finished" or outcome.ttft_s > TTFT_S or outcome.tpot_s > TPOT_S


def candidates(num_devices: int) -> list[Layout]:
    """The divisions whose busiest pool is least busy at the busiest hour."""
    divisions = [
        Layout(encode, prefill, num_devices - encode - prefill)
        for encode in range(1, num_devices - 1)
        for prefill in range(1, num_devices - encode)
    ]
    return sorted(divisions, key=busiest)[:NUM_CANDIDATES]


def busiest(layout: Layout) -> float:
    """The largest part of its time that a pool is busy, over the hours of the day."""
    rng = Random("content")
    texts = [text_draft(rng) for _ in range(500)]
    text = Demand(
        0, 0, fmean(each.num_prompt_tokens for each in texts), fmean(each.num_output_tokens for each in texts)
    )
    draft = video_draft(0)
    video = Demand(draft.media[0].num_rows, 1, draft.num_prompt_tokens, draft.num_output_tokens)
    specs = {spec.role: spec for spec in workers(layout, VL_7B, A100)}
    shares = [
        (TEXT.rate(hour) * seconds(spec, text) + VIDEO.rate(hour) * seconds(spec, video))
        / layout.counts[LETTERS[role]]
        for hour in range(24)
        for role, spec in specs.items()
    ]
    return max(shares)


def runs(num_seeds: int, devices: Sequence[int]) -> Iterator[dict[str, Any]]:
    for seed in range(num_seeds):
        yield simulate(Run(START, seed, is_scaled=True))
    for num_devices in devices:
        first = [simulate(Run(layout, 0, is_scaled=False)) for layout in candidates(num_devices)]
        yield from first
        best = min(first, key=lambda found: found["num_violations"])
        layout = next(each for each in candidates(num_devices) if each.name == best["layout"])
        for seed in range(1, num_seeds):
            yield simulate(Run(layout, seed, is_scaled=False))


def table(found: Iterable[dict[str, Any]]) -> list[str]:
    """Means over the seeds, with 95 % confidence intervals; divisions that ran with all seeds."""
    groups: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault((each["is_scaled"], each["layout"]), []).append(each)
    num_seeds = max(map(len, groups.values()))
    lines = head("pools", "devices, mean", "violations", "of them refused")
    for (is_scaled, layout), group in groups.items():
        if len(group) == num_seeds:
            shares = [each["num_violations"] / each["num_requests"] for each in group]
            mean, half = interval(shares)
            devices, refused = (
                fmean(each["mean_devices"] for each in group),
                sum(e["num_refused"] for e in group),
            )
            name = "scaled" if is_scaled else layout
            lines.append(f"| {name} | {devices:.2f} | {100 * mean:.2f} ± {100 * half:.2f} % | {refused} |")
    return lines
