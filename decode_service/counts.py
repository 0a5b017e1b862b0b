"""How many sequences a decode worker has, by state, and how many tokens they see: for its load report and for
admission.

A sequence is one row of a decode step: each choice has one per prompt of its request. Used on the engine's
thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.state import DecodeChoice, DecodePhase, DecodeRequest


@dataclass
class SequenceCounts:
    num_sequences: int = 0  # of all requests
    num_admitted: int = 0  # sequences of requests that have blocks
    num_running: int = 0  # sequences of requests that run
    num_context_tokens: int = 0  # tokens whose KV the running sequences read

    @property
    def mean_context(self) -> float:
        return self.num_context_tokens / self.num_running

    def run(self, request: DecodeRequest) -> None:
        """The request runs from now on."""
        for choice in request.live_choices:
            self.num_running += len(choice.branches)
            self.count_context(choice)

    def count_context(self, choice: DecodeChoice) -> None:
        """The choice's tokens have changed."""
        self.num_context_tokens += choice.num_context_tokens - choice.num_counted_tokens
        choice.num_counted_tokens = choice.num_context_tokens

    def end_choice(self, request: DecodeRequest, choice: DecodeChoice) -> None:
        """The choice has ended. Its branches are still listed."""
        num_sequences = len(request.request.prompts)
        self.num_sequences -= num_sequences
        if request.admitted_at is not None:
            self.num_admitted -= num_sequences
        if request.phase is DecodePhase.RUNNING:
            self.num_running -= len(choice.branches)
        self.num_context_tokens -= choice.num_counted_tokens
