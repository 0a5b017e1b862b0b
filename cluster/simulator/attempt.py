"""One attempt to serve a request, as the simulated workers see it. The router's own record of it is
`router.flow.state.Attempt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguageRequest
from cluster.engine.timing import Stopwatch
from cluster.scheduling.keys import Ticket
from cluster.simulator.caches import BlockCache
from cluster.simulator.workload import SimRequest
from cluster.types.request import GenerateRequest

if TYPE_CHECKING:
    from cluster.simulator.door import SimDoor
    from cluster.simulator.language import SimLanguage


@dataclass(eq=False, slots=True)
class SimAttempt:
    """The prompt of an attempt after a preemption contains what was generated before."""

    request: SimRequest
    asked: GenerateRequest
    door: SimDoor
    prefill: SimLanguage  # the worker that computes the prompt
    decode: SimLanguage  # … and the one that generates the answer, which may be the same
    waited_s: float  # since the request arrived, when the attempt started
    is_cancelled: bool = False
    second_at: float = 0.0  # expected instant of the second token

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.asked.prompt.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Still to be generated, the first one included."""
        return self.asked.stop.max_tokens


@dataclass(eq=False, slots=True)
class Held:
    """What one worker holds of an attempt, with the engine's own records of it: tokens
    [0, num_computed_tokens) of the sequence have their KV here."""

    attempt: SimAttempt
    request: LanguageRequest
    sequence: TokenSequence
    is_counted: bool = False  # among the prompts that the worker has still to compute
    has_blocks: bool = False
    shared: list[bytes] = field(default_factory=list)  # blocks with a hash
    num_anonymous: float = 0.0  # other blocks
    # Sent: is the receiver known, and which tokens are on their way
    is_granted: bool = False
    num_sent: int = 0
    # Generated
    joined_v: float = inf  # its tokens are counted in steps from here
    counted_v: float = 0.0  # its memory from here: within the step in which it came
    num_told: int = 0  # of its tokens, without the first one

    @property
    def num_missing(self) -> int:
        """Tokens of the prompt that are still to be computed here."""
        return self.sequence.num_missing_tokens if self.request.computes else 0

    def ticket(self, num_tokens: int) -> Ticket:
        request = self.request
        is_text = not request.needs_embeddings
        return Ticket(request.request_id, request.arrived_at, num_tokens, is_text, request.priority)

    def hold_blocks(self, shared: list[bytes], num_new: int, num_cached_tokens: int) -> None:
        """Notes the blocks of the prompt. The shared ones have the KV of so many tokens."""
        self.has_blocks, self.shared, self.num_anonymous = True, shared, num_new
        self.sequence.share([0] * len(shared), num_cached_tokens)

    def name_blocks(self, blocks: BlockCache, block_size: int) -> None:
        """Full blocks that are here can be reused. A block whose content is here already remains
        anonymous."""
        hashes, sequence = self.attempt.request.block_hashes, self.sequence
        num_full = min(sequence.num_computed_tokens // block_size, len(hashes))
        for i in range(sequence.num_registered, num_full):
            if blocks.name(hashes[i]):
                self.shared.append(hashes[i])
                self.num_anonymous -= 1
        sequence.registered(num_full)


def hold(attempt: SimAttempt, worker: SimLanguage, now: float) -> Held:
    """Makes the record of a request whose first message has come."""
    asked, arrived_at = attempt.asked, now - attempt.waited_s
    computes, sends = attempt.prefill is worker, attempt.decode is not worker
    request = LanguageRequest(asked, 0, inf, arrived_at, Stopwatch(now), computes, sends)
    request.choices.clear()  # answers are counted, not generated
    sequence = TokenSequence(asked.request_id, asked.prompt)
    request.add_prompt(sequence)
    return Held(attempt, request, sequence)
