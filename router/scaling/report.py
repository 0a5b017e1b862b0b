"""What one door reports to the scaling policy: what arrives here, what waits here, and how
busy the workers are, as this door sees them. Pure; reads only."""

from __future__ import annotations

import numpy as np

from router.admission.controller import AdmissionController
from router.flow.placer import Placer
from router.policy import answers_step_s
from router.scaling.snapshot import DoorReport


def door_report(
    admission: AdmissionController, placer: Placer, num_answered: float, num_in_time: float
) -> DoorReport:
    """`num_answered`, `num_in_time`: requests that got a first token at this door, since its start; those of
    them that got it within the target."""
    totals, reported, decodes = admission.totals, placer.reported(), placer.cluster.decodes
    waiting_encode_s = sum(ticket.encode_s for ticket in admission.waiting)
    used = decodes.reported_blocks / np.maximum(1.0, decodes.num_blocks)
    fixed_s = decodes.curve("decode").fixed_s[decodes.is_listed]
    return DoorReport(
        num_requests=totals.num_offered.total(),
        encode_s=totals.encode_s,
        prefill_s=totals.prefill_s,
        encode_s2=totals.encode_s2,
        prefill_s2=totals.prefill_s2,
        num_answered=num_answered,
        num_in_time=num_in_time,
        num_refused=totals.num_refused.total(),
        waiting_encode_s=waiting_encode_s,
        waiting_prefill_s=sum(ticket.work_s for ticket in admission.waiting) - waiting_encode_s,
        queued_encode_s=reported.encode_s,
        queued_prefill_s=reported.prefill_s,
        used_blocks_ratio=float(used.sum()),
        answers_s=float(answers_step_s(decodes).sum()),
        step_s=float(fixed_s.mean()) if len(fixed_s) else 0.0,
    )
