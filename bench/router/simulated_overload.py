"""More requests than the cluster can serve: what the admission queue saves."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from bench.records import Record
from bench.router.cases import OVERLOAD_LAYOUTS, OverloadCase
from bench.router.policies import maker
from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from deploy.simulator.demand import capacity, demand
from deploy.simulator.hardware import H200, VL_7B
from deploy.simulator.layouts import workers
from deploy.simulator.results import WARM_UP_SHARE, Outcome, Slo, fields, summarise
from deploy.simulator.simulation import Simulation
from deploy.simulator.workload import Draft, Workload, image_prompts, text

SLO = Slo(ttft_s=3.0)
CLASSES = (
    AdmissionClassArgs(
        name="interactive", max_priority=0, max_wait_s=2.0, target_ttft_s=SLO.ttft_s, weight=8.0
    ),
    AdmissionClassArgs(name="batch", max_wait_s=20.0),
)
BATCH_TTFT_S = 30.0  # a batch request counts as good within this


def drafts(rng: Random) -> Iterator[Draft]:
    """Three text prompts, a fifth of them batch, to one with an image."""
    texts, media = text(num_tenants=10)(rng), image_prompts(1, 400)(rng)
    while True:
        yield next(media) if rng.random() < 0.25 else next(texts)


WORKLOAD = Workload("overload", drafts)


def overload(case: OverloadCase) -> Record:
    specs = workers(OVERLOAD_LAYOUTS[case.layout], VL_7B, H200)
    rate = case.load * capacity(specs, demand(WORKLOAD))
    args = AdmissionArgs(classes=CLASSES)
    simulation = Simulation(
        specs, [maker("joint")], VL_7B, case.seed, admission=args if case.has_admission else None
    )
    num_requests = int(rate * case.arrivals_s)
    outcomes = simulation.run(WORKLOAD.requests(rate, num_requests, case.seed))
    waits = {name: [o.waited_s for o in outcomes if _class(o) == name] for name in ("interactive", "batch")}
    good = [outcome for outcome in outcomes if _is_good(outcome)]
    window = (WARM_UP_SHARE * case.arrivals_s, case.arrivals_s)
    in_window = [o for o in good if window[0] <= o.request.arrived_at + o.ttft_s < window[1]]
    seconds = window[1] - window[0]
    return fields(summarise(outcomes, SLO)) | {
        "rate": round(rate, 2),
        "good_work": round(sum(o.request.num_prompt_tokens for o in in_window) / seconds, 1),
        "good_by_class": {
            name: round(sum(_class(o) == name for o in in_window) / seconds, 2) for name in waits
        },
        "longest_wait_s": {name: round(max(of_class, default=0.0), 3) for name, of_class in waits.items()},
    }


def _class(outcome: Outcome) -> str:
    return "batch" if outcome.request.priority > 0 else "interactive"


def _is_good(outcome: Outcome) -> bool:
    """Finished, and its first token came within what its class is promised."""
    limit_s = BATCH_TTFT_S if _class(outcome) == "batch" else SLO.ttft_s
    return outcome.status == "finished" and outcome.ttft_s <= limit_s
