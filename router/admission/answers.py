"""What admission control is told about the cluster, and what it answers. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of the whole cluster, as this door sees it. A worker counts by the part of its time that
    running answers leave."""

    num_encoders: float
    num_prefills: float
    num_blocks: int  # of all workers that decode
    num_both: float = 0.0  # that are in both of the first two, and have their time only once

    @property
    def num_workers(self) -> float:
        """Workers that encode or prefill."""
        return self.num_encoders + self.num_prefills - self.num_both

    def seconds(self, encode_s: float, prefill_s: float) -> float:
        """How long the whole cluster takes for work that any of its workers can do, each by its phases."""
        return max(
            encode_s / (self.num_encoders or 1.0),
            prefill_s / (self.num_prefills or 1.0),
            (encode_s + prefill_s) / (self.num_workers or 1.0),
        )


@dataclass(frozen=True, slots=True)
class Reported:
    """The workers' own reports of their load, which comes from all doors."""

    encode_s: float = 0.0  # predicted seconds of all encoders' queues together
    prefill_s: float = 0.0
    num_blocks: int = 0  # used, of all decode workers


class RefusalReason(StrEnum):
    WAIT = "wait"  # would wait, or has waited, longer than its class allows
    TARGET = "target"  # would miss, or can no longer meet, the target of its class
    FULL = "full"  # too many requests wait at this door
    # a full queue gave its place to a more important class or to a tenant with fewer requests
    DISPLACED = "displaced"


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request starts now."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits at the door."""


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    retry_after_s: int  # until there is room, if requests keep arriving as fast as they start
    reason: RefusalReason
    message: str  # for the client; see cluster.overload

    def to_error(self) -> OverloadedError:
        """The error for the client."""
        return OverloadedError(self.message, retry_after_s=self.retry_after_s)
