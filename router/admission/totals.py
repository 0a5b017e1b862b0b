"""What arrived at a door's admission since its start, and what was refused. For metrics and for scaling."""

from __future__ import annotations

from collections import Counter

from router.admission.answers import RefusalReason
from router.admission.fair_queue import AdmissionTicket


class AdmissionTotals:
    """`encode_s`, `prefill_s`: predicted work of all requests that arrived, admitted or not; `…_s2`: the sums
    of the squares of each request's. A request that
    is offered again, because there was no worker for it, counts again."""

    def __init__(self) -> None:
        self.num_offered: Counter[str] = Counter()  # by class
        self.num_refused: Counter[tuple[str, RefusalReason]] = Counter()  # by class and reason
        self.encode_s = self.prefill_s = 0.0
        self.encode_s2 = self.prefill_s2 = 0.0

    def offered(self, ticket: AdmissionTicket) -> None:
        self.num_offered[ticket.class_name] += 1
        prefill_s = ticket.work_s - ticket.encode_s
        self.encode_s += ticket.encode_s
        self.prefill_s += prefill_s
        self.encode_s2 += ticket.encode_s**2
        self.prefill_s2 += prefill_s**2

    def refused(self, ticket: AdmissionTicket, reason: RefusalReason) -> None:
        self.num_refused[ticket.class_name, reason] += 1
