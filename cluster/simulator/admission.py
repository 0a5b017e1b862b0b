"""Admission control of a simulated door: the real one, or none at all."""

from __future__ import annotations

from cluster.config.settings import AdmissionArgs
from router.admission.controller import AdmissionController, Settled
from router.admission.queue import AdmissionQueue, AdmissionTicket, Capacity, Reported

NO_CAPACITY = Capacity(0, 0, 0)  # until workers have joined


def admission_controller(args: AdmissionArgs | None, text_share: float) -> AdmissionController:
    """`args`: None for a door that admits every request at once. `text_share`: see `AdmissionQueue`."""
    if args is None:
        return OpenAdmission()
    return AdmissionController(AdmissionQueue(args, text_share, NO_CAPACITY))


class OpenAdmission(AdmissionController):
    """Admits every request at once, and counts nothing."""

    def __init__(self) -> None:
        super().__init__(AdmissionQueue(AdmissionArgs(), 0.0, NO_CAPACITY))

    def offer(self, ticket: AdmissionTicket, now: float) -> bool:
        return True

    def report(self, capacity: Capacity, reported: Reported) -> None:
        pass

    def encoded(self, request_id: str) -> None:
        pass

    def done(self, request_id: str) -> None:
        pass

    def leave(self, request_id: str) -> None:
        pass

    def settle(self, now: float) -> list[Settled]:
        return []
