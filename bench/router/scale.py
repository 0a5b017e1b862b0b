"""Whether the simulator, and the policy in it, are fast enough for a large cluster: a thousand replicas, a
million requests."""

from __future__ import annotations

import gc
import resource
import time
from typing import Any

from bench.router.policies import maker
from deploy.simulator.demand import capacity, demand
from deploy.simulator.hardware import H200, VL_7B
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import Outcome
from deploy.simulator.simulation import Simulation
from deploy.simulator.workload import Workload, image_prompts, text

LOAD = 0.7  # of what the narrowest phase can serve


def scale(num_replicas: int, num_requests: int, policy: str, media: bool, seed: int = 0) -> dict[str, Any]:
    """One run at `LOAD`; only the numbers of a request are kept."""
    num_encode = num_replicas // 5 if media else 0
    num_decode = num_replicas // 5
    layout = Layout(num_encode, num_replicas - num_encode - num_decode, num_decode)
    workload = Workload("scale", image_prompts(1, 400) if media else text(num_output=50))
    specs = workers(layout, VL_7B, H200)
    rate = LOAD * capacity(specs, demand(workload))
    ttfts: list[float] = []
    num_ended = 0

    def ended(outcome: Outcome) -> None:
        nonlocal num_ended
        num_ended += 1
        ttfts.append(outcome.ttft_s)

    gc.set_threshold(100_000, 50, 50)  # there are few cycles: looking for them takes a quarter of the time
    began_s = time.perf_counter()
    simulation = Simulation(specs, [maker(policy)], VL_7B, seed, on_outcome=ended)
    simulation.run(workload.requests(rate, num_requests, seed))
    took_s = time.perf_counter() - began_s
    ttfts.sort()
    return {
        "type": "scale",
        "policy": policy,
        "layout": layout.name,
        "num_requests": num_requests,
        "num_ended": num_ended,
        "rate": rate,
        "simulated_s": simulation.loop.now,
        "events": simulation.loop.num_run,
        "ttft_p50_s": ttfts[len(ttfts) // 2],
        "ttft_p99_s": ttfts[len(ttfts) * 99 // 100],
        "seconds": took_s,
        "us_per_request": 1e6 * took_s / num_requests,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
