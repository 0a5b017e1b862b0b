"""How many sequences of answers an engine has, by state, and how many tokens they see: for its load report
and for admission.

A sequence is one row of a decode step: each choice has one per prompt of its request. Used on the engine's
thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.state import AnswerChoice, LanguagePhase, LanguageRequest


@dataclass
class SequenceCounts:
    num_sequences: int = 0  # of all requests
    num_admitted: int = 0  # sequences of requests that have blocks
    num_running: int = 0  # sequences of requests that run
    num_context_tokens: int = 0  # tokens whose KV the running sequences read
    num_sending_blocks: int = 0  # of prompts that are computed for other workers

    def start(self, request: LanguageRequest) -> None:
        """The request has entered the engine."""
        self.num_sequences += request.num_sequences

    def admit(self, request: LanguageRequest) -> None:
        """The request has its blocks from now on."""
        self.num_admitted += request.num_sequences
        self.num_sending_blocks += request.num_sending_blocks

    def end(self, request: LanguageRequest) -> None:
        """The request leaves the engine; its choices have ended."""
        self.num_sending_blocks -= request.num_sending_blocks

    @property
    def mean_context(self) -> float:
        return self.num_context_tokens / self.num_running

    def run(self, request: LanguageRequest) -> None:
        """The request runs from now on."""
        for choice in request.live_choices:
            self.num_running += len(choice.sequences)
            self.count_context(choice)

    def count_context(self, choice: AnswerChoice) -> None:
        """The choice's tokens have changed."""
        self.num_context_tokens += choice.count_context()

    def end_choice(self, request: LanguageRequest, choice: AnswerChoice) -> None:
        """The choice has ended. Its sequences are still listed."""
        num_sequences = len(request.request.prompts)
        self.num_sequences -= num_sequences
        if request.is_admitted:
            self.num_admitted -= num_sequences
        if request.phase is LanguagePhase.RUNNING:
            self.num_running -= len(choice.sequences)
        self.num_context_tokens -= choice.num_counted_tokens
