"""How long a step lasts, learnt from every step: step_s ≈ fixed + per_unit · units + per_pair · units ·
context.

All coefficients are at least zero. Least squares with directional forgetting (Cao and Schwartz, "A
directional forgetting algorithm based on the decomposition of the information matrix", 2000): a step replaces
what was known of similar steps, while what is known of other steps fades more slowly. So hundreds of small
steps do not erase what is known of large ones. Solved by a few sweeps of projected coordinate descent that
start from the last answer. If the data says nothing (all steps are alike), the answer stays where it was and
does not diverge.

A hiccup only adds time. Therefore a slow step counts as at most twice its prediction. A step of less than
half its prediction is believed at once: what was known loses most of its weight. A lasting slowdown is
followed by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.types.curves import Curve

# On simulated devices with 10% noise and hiccups of 20 times a step in 3% of the steps, a device that becomes
# three times slower or faster is followed in 20 to 80 steps. After 400 steps of one sequence, steps of 64
# sequences are predicted within a quarter; if all steps were forgotten alike, at 0.4 to 4 times their
# duration.
MEMORY_STEPS = 16  # the weight of a step has fallen to 1/e after this many more steps like it …
LONG_MEMORY_STEPS = 96  # … or this many steps of any kind
MAX_SURPRISE = 2.0  # a step counts as at most this many times its prediction
FAST_STEP_RATIO = 0.5  # if a step takes less than this part of its prediction, the past is wrong
KEPT_AFTER_FAST_STEP = 0.25  # weight that is left to the past then
NUM_SWEEPS = 4  # eight fit no better, one overshoots after a change of speed
# A coefficient with less weight stays: a step of almost no context says nothing about the cost of context.
FAINT = 1e-12
FIT_ORDER = (1, 2, 0)  # what cannot be separated is attributed to the units, which is the cautious reading


class StepFit:
    """Fits how long steps last. Used on one engine's thread only. Durations in seconds. The owner defines
    what a unit is, and what a unit sees."""

    def __init__(self, large_units: int, large_context: int):
        """Units and context of a large step. Both are divided by these values, so that the sweeps
        converge."""
        self._large_units = large_units
        self._large_context = large_context
        # Fixed, per unit, per pair: coefficients of the features of `_features`.
        self._parts = [0.0, 0.0, 0.0]
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self._usual: tuple[float, float] | None = None  # mean units and context of recent steps

    def observe(self, units: float, context: float, step_s: float) -> None:
        """A step computed `units` units in `step_s`. Each unit saw a context of `context` on average."""
        predicted_s = self.predicted_s(units, context)
        kept = 1 - 1 / MEMORY_STEPS
        if predicted_s > 0:
            step_s = min(step_s, MAX_SURPRISE * predicted_s)
            if step_s < FAST_STEP_RATIO * predicted_s:
                kept = KEPT_AFTER_FAST_STEP
        features, kept_of_all = self._features(units, context), 1 - 1 / LONG_MEMORY_STEPS
        self._forget(features, 1 - kept)
        for i, x in enumerate(features):
            self._targets[i] = kept_of_all * self._targets[i] + x * step_s
            row = self._moments[i]
            for j, y in enumerate(features):
                row[j] = kept_of_all * row[j] + x * y
        self._solve()
        old_units, old_context = self._usual or (units, context)
        self._usual = (
            old_units + (units - old_units) / MEMORY_STEPS,
            old_context + (context - old_context) / MEMORY_STEPS,
        )

    def predicted_s(self, units: float, context: float) -> float:
        """How long such a step should last. Zero before the first observation."""
        fixed, per_unit, per_pair = self._parts
        _, share, pairs = self._features(units, context)
        return fixed + per_unit * share + per_pair * pairs

    def curve(self) -> Curve | None:
        """What has been learnt. None before the first observation."""
        if self._usual is None:
            return None
        fixed, per_unit, per_pair = self._parts
        return Curve(
            fixed, per_unit / self._large_units, per_pair / (self._large_units * self._large_context)
        )

    def has_deviated(self, reported: Curve | None, ratio: float) -> bool:
        """Whether the prediction for a step like the recent ones differs from that of `reported` by more than
        `ratio`."""
        curve = self.curve()
        if reported is None or curve is None or self._usual is None:
            return reported is not curve
        units, context = self._usual
        now_s, reported_s = curve.seconds(units, context), reported.seconds(units, context)
        return abs(now_s - reported_s) > ratio * reported_s

    def _features(self, units: float, context: float) -> tuple[float, float, float]:
        share = units / self._large_units
        return 1.0, share, share * context / self._large_context

    def _forget(self, features: tuple[float, float, float], share: float) -> None:
        """Forgets this share of what is known about such a step, and nothing of what is known about other
        steps."""
        known = [_dot(row, features) for row in self._moments]
        weight = _dot(known, features)
        if weight <= 0:
            return
        sum_s = _dot(self._targets, features)
        for i, row in enumerate(self._moments):
            lost = share * known[i] / weight
            self._targets[i] -= lost * sum_s
            for j in range(3):
                row[j] -= lost * known[j]

    def _solve(self) -> None:
        for _ in range(NUM_SWEEPS):
            for i in FIT_ORDER:
                row = self._moments[i]
                if row[i] > FAINT:
                    rest = _dot(row, self._parts) - row[i] * self._parts[i]
                    self._parts[i] = max(0.0, (self._targets[i] - rest) / row[i])


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns the dot product of three numbers each."""
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]
