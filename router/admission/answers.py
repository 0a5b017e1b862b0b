"""What admission control is told about the cluster, and what it answers. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the whole cluster, as this door sees it."""

    num_encoders: int
    num_prefills: int
    num_blocks: int  # of all decode workers


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
