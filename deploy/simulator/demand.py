"""What a workload asks of each phase, and how many requests a second a cluster could serve at most.
Arithmetic, no simulation: the simulator's searches begin here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from cluster.types.media import Modality
from cluster.types.members import Phase
from deploy.simulator.hardware import BLOCK_SIZE
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.workload import Workload

NUM_SAMPLED = 500
ITEMS_PER_CALL = 2  # of an encoder, on average
TOKENS_PER_STEP = 2048  # of prefill, on average


@dataclass(frozen=True)
class Demand:
    """What a mean request needs, without any reuse."""

    num_rows: float
    num_items: float
    num_tokens: float
    num_output_tokens: float


def demand(workload: Workload) -> Demand:
    drafts = list(islice(workload.drafts(Random("content 0")), NUM_SAMPLED))
    mean = statistics.fmean
    return Demand(
        num_rows=mean(sum(item.num_rows for item in draft.media) for draft in drafts),
        num_items=mean(len(draft.media) for draft in drafts),
        num_tokens=mean(draft.num_prompt_tokens for draft in drafts),
        num_output_tokens=mean(draft.num_output_tokens for draft in drafts),
    )


def seconds(spec: WorkerSpec, wanted: Demand) -> float:
    """How long the worker's device is busy for a mean request."""
    curves, busy_s = spec.curves, 0.0
    if spec.role.encodes:
        curve = (spec.encoder or curves).encode[Modality.IMAGE]
        busy_s += curve.fixed_s * wanted.num_items / ITEMS_PER_CALL + curve.per_unit_s * wanted.num_rows
    if spec.role.prefills and curves.prefill is not None:
        steps = wanted.num_tokens / TOKENS_PER_STEP
        busy_s += curves.prefill.seconds(wanted.num_tokens, wanted.num_tokens / 4)
        busy_s += steps * curves.prefill.fixed_s
    if spec.role.decodes and curves.decode is not None:
        context = wanted.num_tokens + wanted.num_output_tokens / 2
        batch = max(1.0, min(spec.max_batch, spec.num_blocks * BLOCK_SIZE / context))
        busy_s += wanted.num_output_tokens * curves.decode.seconds(batch, context) / batch
    return busy_s


def capacity(specs: Sequence[WorkerSpec], wanted: Demand) -> float:
    """Requests a second of the narrowest phase; a worker of several phases gives all of them its time in
    proportion to what is asked of them. 0 where a worker has no room for the model."""
    if any(spec.num_blocks < 0 for spec in specs):
        return 0.0
    rates = []
    for phase in Phase:
        able = [spec for spec in specs if phase in spec.role.phases]
        if able and seconds(able[0], wanted) > 0:
            rates.append(sum(1 / seconds(spec, wanted) for spec in able))
        elif not able and (phase is not Phase.ENCODE or wanted.num_rows):
            return 0.0
    return min(rates)
