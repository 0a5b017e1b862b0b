"""How many prompt tokens a step may hold, so that it lasts at most a target time: other work on the same
device waits no longer than that.

The duration of a step is learnt (`cluster.scheduling.fit`). What was learnt is not trusted far beyond what
was seen: a budget is at most twice the longest step so far. On simulated devices with 10% noise and hiccups,
steps stay within 25% of the target.
"""

from __future__ import annotations

import math

from cluster.scheduling.fit import StepFit


class StepBudget:
    """Belongs to one engine. Durations in seconds, counts in tokens. min_tokens (one block) <= answer <=
    max_step_tokens."""

    def __init__(self, step_target_s: float, min_tokens: int, max_tokens: int):
        if step_target_s <= 0 or not 0 < min_tokens <= max_tokens:
            raise ValueError(f"not a step budget: {step_target_s} s, {min_tokens} to {max_tokens} tokens")
        self._step_target_s = step_target_s
        self.min_tokens = min_tokens
        self.max_step_tokens = max_tokens
        self.fit = StepFit(max_tokens, max_tokens)
        self._num_seen = 0  # tokens of the longest step

    def observe(self, tokens: int, context: float, step_s: float) -> None:
        """A step computed `tokens` tokens in `step_s`. Each token saw `context` earlier tokens on average."""
        self._num_seen = max(self._num_seen, tokens)
        self.fit.observe(tokens, context, step_s)

    def predicted_s(self, tokens: int, context: float) -> float:
        """How long such a step should last. Zero before the first observation."""
        return self.fit.predicted_s(tokens, context)

    def max_tokens(self, context: float, limit_s: float = math.inf) -> int:
        """How many tokens, each of which sees `context` earlier ones on average, may run in the next step, if
        it should last no longer than the target and no longer than `limit_s`."""
        target_s = min(self._step_target_s, limit_s)
        ceiling = min(self.max_step_tokens, max(self.min_tokens, 2 * self._num_seen))
        fixed_s = self.fit.predicted_s(0, context)
        slope = (self.fit.predicted_s(self.max_step_tokens, context) - fixed_s) / self.max_step_tokens
        if slope <= 0:
            return ceiling if fixed_s < target_s else self.min_tokens
        tokens = (target_s - fixed_s) / slope
        return int(max(self.min_tokens, min(ceiling, tokens)))
