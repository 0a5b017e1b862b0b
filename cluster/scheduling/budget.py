"""How many prompt tokens a step may hold, so that it lasts at most a target time: other work on the same
device waits no longer than that.

A step whose fixed part alone exceeds the target would hold one block and cost as much as one of many. So a
step holds at least the tokens that cost as much as its fixed part: it lasts twice that part, and a prompt
takes at most twice as long as in one step (`tokens_that_fit`, by which doors predict, too).

The duration of a step is learnt (`cluster.scheduling.fit`). What was learnt is not trusted far beyond what
was seen: a budget is at most twice the longest step so far. On simulated devices with 10% noise and hiccups,
steps stay within 25% of the target.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cluster.scheduling.fit import StepFit

LEAST_TOKEN_S = 1e-12  # of a curve that says that tokens cost nothing
Number = TypeVar("Number", float, NDArray[np.float64])


def tokens_that_fit(limit_s: Number, fixed_s: Number, token_s: Number, least: Number) -> Number:
    """How many tokens of prompts a step may compute that should last no longer than `limit_s`: those that
    fill the time that the step's fixed part leaves, and at least `least`. Seconds and tokens, numbers or
    arrays of one shape."""
    fitting = (limit_s - fixed_s) / np.maximum(token_s, LEAST_TOKEN_S)
    return cast(Number, np.maximum(fitting, least))


def tokens_of_fixed_part(fixed_s: Number, token_s: Number) -> Number:
    """How many tokens cost as much as the fixed part of a step. Numbers or arrays of one shape."""
    return cast(Number, fixed_s / np.maximum(token_s, LEAST_TOKEN_S))


def is_left_for_item(tokens_s: Any, fixed_s: Any) -> Any:
    """Whether text in front of a media item that is not there yet waits for the item, where no answers run:
    if its tokens take less than the fixed part of a step. They cost less together with the item, which would
    wait for a step of theirs, too. Engines go by this, and doors predict by it. Numbers or arrays of one
    shape."""
    return tokens_s < fixed_s


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
        self._least_tokens = 0.0  # that cost as much as the fixed part, when steps were growing

    def observe(self, tokens: int, context: float, step_s: float) -> None:
        """A step computed `tokens` tokens in `step_s`. Each token saw `context` earlier tokens on average."""
        self.fit.observe(tokens, context, step_s)
        if tokens > self._num_seen:
            self._num_seen = tokens
            self._least_tokens = tokens_of_fixed_part(*self._parts(0.0))

    def predicted_s(self, tokens: int, context: float) -> float:
        """How long such a step should last. Zero before the first observation."""
        return self.fit.predicted_s(tokens, context)

    def max_tokens(self, context: float, limit_s: float = math.inf) -> int:
        """How many tokens, each of which sees `context` earlier ones on average, may run in the next step, if
        it should last no longer than the target and no longer than `limit_s`, as far as `tokens_that_fit`
        allows."""
        ceiling = min(self.max_step_tokens, max(self.min_tokens, 2 * self._num_seen))
        target_s = min(self._step_target_s, limit_s)
        fixed_s, token_s = self._parts(context)
        least = self._least_tokens * self._parts(0.0)[1] / max(token_s, LEAST_TOKEN_S)
        tokens = tokens_that_fit(target_s, fixed_s, token_s, least)
        return int(max(self.min_tokens, min(ceiling, tokens)))

    def _parts(self, context: float) -> tuple[float, float]:
        """Seconds of a step's fixed part, and of each token."""
        fixed_s = self.fit.predicted_s(0, context)
        whole_s = self.fit.predicted_s(self.max_step_tokens, context)
        return fixed_s, (whole_s - fixed_s) / self.max_step_tokens
