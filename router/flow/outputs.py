"""What the request flow wants done. Plain values: the driver of the flow carries them out, in order."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.errors import ClusterError
from cluster.types.messages import AnyMessage, TokenEvent
from router.telemetry.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a worker. If it cannot be sent, the driver says so (`RequestFlow.on_send_failed`)."""

    replica_id: str
    message: AnyMessage
    request_id: str = ""  # the request that fails with it; empty: none
    owner: str = ""  # the worker whose grant the message passes on; empty: it passes none on


class Deliver(msgspec.Struct, frozen=True):
    """New tokens of one choice, or the error that ends it, to its reader."""

    request_id: str  # the client's
    choice_idx: int
    event: TokenEvent | ClusterError


@dataclass(frozen=True, slots=True)
class CallDecode:
    """The one call to the decode replica through Ray Serve, which counts the request there. Left out if the
    request has ended by then; a call that fails is told by `RequestFlow.on_call_failed`."""

    replica_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A request is placed and its first messages follow: `timeline` lacks the instant."""

    timeline: RequestTimeline


@dataclass(frozen=True, slots=True)
class Drained:
    """The worker is not listed any more and no request is left there: its connection can be closed."""

    replica_id: str


Output = Send | Deliver | CallDecode | Placed | Drained
