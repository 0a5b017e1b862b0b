"""One attempt to serve a request, as the simulated workers see it. The router's own record of it is
`router.flow.state.Attempt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.simulator.workload import SimRequest

if TYPE_CHECKING:
    from cluster.simulator.decode import SimDecode
    from cluster.simulator.door import SimDoor
    from cluster.simulator.prefill import SimPrefill


@dataclass(eq=False, slots=True)
class SimAttempt:
    """Tokens [0, num_computed) of the prompt have their KV at prefill, the KV of [0, num_sent) is on its way
    to decode.

    The prompt of an attempt after a preemption contains what was generated before.
    """

    request: SimRequest
    request_id: str  # of the attempt
    door: SimDoor
    prefill: SimPrefill  # of the decode worker, if that computes the prompt
    decode: SimDecode
    waited_s: float  # since the request arrived, when the attempt started
    num_tokens: int
    num_output_tokens: int  # still to be generated, the first one included
    is_missing: list[bool]  # by item: its embeddings are not at prefill yet, and are needed

    # at prefill
    asked_at: float = 0.0
    started_at: float = 0.0  # at the end of the step during which it came
    admitted_at: float = 0.0
    blocked_at: float | None = None
    media_s: float = 0.0
    computing_s: float = 0.0
    num_cached: int = 0
    num_computed: int = 0
    shared: list[bytes] = field(default_factory=list)
    num_anonymous: int = 0
    num_named: int = 0  # full blocks whose content is complete
    is_cancelled: bool = False

    # on the way to decode
    is_granted: bool = False  # prefill knows where the KV goes
    num_sent: int = 0
    is_complete: bool = False

    # at decode
    num_blocks: int = 0
    joined_v: float = 0.0  # its tokens are counted in steps from here
    counted_v: float = 0.0  # its memory from here: within the step in which it came
    num_told: int = 0  # of its tokens, without prefill's
    second_at: float = 0.0  # expected instant of the second token

    @property
    def num_ready(self) -> int:
        """Tokens of the prompt whose embeddings are there."""
        for item, is_missing in zip(self.request.media, self.is_missing, strict=True):
            if is_missing:
                return item.start
        return self.num_tokens
