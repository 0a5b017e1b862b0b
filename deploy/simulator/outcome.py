"""What became of one simulated request."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.simulator.workload import SimRequest
from router.policy import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Instants are seconds of the run, durations are seconds. A request without a first token has zeros."""

    request: SimRequest
    status: str  # finished, refused (by admission), failed
    waited_s: float = 0.0  # at the door, for admission
    ttft_s: float = 0.0
    second_s: float = 0.0  # arrival to the second token
    finished_at: float
    tpot_s: float = 0.0
    num_attempts: int = 1
    num_cached: int = 0  # prompt tokens
    decided_ttft_s: float = 0.0  # start of the first attempt to the first token
    prediction: Prediction | None = None
