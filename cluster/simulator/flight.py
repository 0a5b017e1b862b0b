"""One attempt to serve a request, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.simulator.workload import SimRequest
from cluster.types.messages import EncodeTiming
from router.policy import Placement, Prediction, RequestView

if TYPE_CHECKING:
    from cluster.simulator.decode import SimDecode
    from cluster.simulator.door import SimDoor
    from cluster.simulator.prefill import SimPrefill


@dataclass(eq=False, slots=True)
class Flight:
    """[0, num_computed) of the prompt's `num_tokens` have their KV at prefill, [0, num_sent) are on their way to decode.

    A request that lost its worker flies again, with what it has generated as part of the prompt.
    """

    request: SimRequest
    view: RequestView
    door: SimDoor
    placement: Placement
    prediction: Prediction
    decided_at: float
    prefill: SimPrefill
    decode: SimDecode
    num_tokens: int
    num_output_tokens: int  # still to be generated, the first one included
    encoders: list[str]
    is_missing: list[bool]  # by item: its embeddings are not at prefill yet, and are needed
    timings: list[EncodeTiming | None]
    is_shared: list[bool]  # by item: another request brings them
    returning: frozenset[str]  # hashes of media that some encoder had when it was placed
    is_over: bool = False

    # at prefill
    asked_at: float = 0.0
    started_at: float = 0.0  # looked at
    admitted_at: float = 0.0
    blocked_at: float | None = None
    media_s: float = 0.0
    computing_s: float = 0.0
    num_cached: int = 0
    num_computed: int = 0
    shared: list[bytes] = field(default_factory=list)
    num_anonymous: int = 0
    num_named: int = 0  # full blocks whose content is complete

    # on the way to decode
    granted_at: float | None = None
    num_sent: int = 0
    is_complete: bool = False

    # at decode
    num_blocks: int = 0
    is_at_decode: bool = False  # all its KV
    joined_v: float = 0.0  # its tokens are counted in steps from here
    counted_v: float = 0.0  # its memory from here: within the step in which it came

    @property
    def request_id(self) -> str:
        return self.view.request_id

    @property
    def num_ready(self) -> int:
        """Tokens of the prompt whose embeddings are there."""
        for item, is_missing in zip(self.request.media, self.is_missing, strict=True):
            if is_missing:
                return item.start
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Instants are of the run; a request without a first token has ended without one."""

    request: SimRequest
    status: str  # finished, refused (by admission), failed
    waited_s: float = 0.0  # at the door, for admission
    ttft_s: float = 0.0
    second_s: float = 0.0  # arrival to the second token, as expected when decode took it on
    finished_at: float = 0.0
    tpot_s: float = 0.0
    num_flights: int = 1
    num_cached: int = 0  # prompt tokens
    decided_ttft_s: float = 0.0  # decision to first token
    prediction: Prediction | None = None
