"""Clusters in virtual time: requests go in, what became of each comes out. Qwen2.5-VL-7B on A100."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from bench.router.policies import maker
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.curves import Link
from deploy.simulator.hardware import A100, VL_7B, Model
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import Outcome
from deploy.simulator.simulation import SCHEDULING, Simulation
from deploy.simulator.workload import Draft, Item, SimRequest, block_keys


def request(number: int, at: float, tokens: int, output: int, *media: Item, kind: str = "") -> SimRequest:
    """One whose prompt no other shares."""
    keys = block_keys(Draft(tokens, output, 0), number)
    return SimRequest(f"r{number}", at, tokens, output, keys, media, kind=kind)


def simulation(
    layout: Layout,
    policy: str = "joint",
    sent: Model = VL_7B,
    link: Link | None = None,
    scheduling: SchedulingPolicy = SCHEDULING,
) -> Simulation:
    """`sent`: the model as KV is sent. `link`: between all workers, instead of the usual one."""
    specs = workers(layout, VL_7B, A100)
    if link is not None:
        specs = [replace(s, curves=msgspec.structs.replace(s.curves, links={"": link})) for s in specs]
    return Simulation(specs, [maker(policy)], sent, noise=0.0, scheduling=scheduling)


def serve(layout: Layout, requests: Iterable[SimRequest], policy: str = "joint") -> Sequence[Outcome]:
    """Raises RuntimeError if a request fails."""
    outcomes = simulation(layout, policy).run(requests)
    if any(outcome.status != "finished" for outcome in outcomes):
        raise RuntimeError("a simulated request failed")
    return outcomes
