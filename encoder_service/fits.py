"""What an encoder worker learns of its own speed, by modality. Owned by the engine's thread."""

from __future__ import annotations

import math

from cluster.scheduling.encoder_calls import rows_of_a_call
from cluster.scheduling.fit import StepFit
from cluster.types.curves import Curve
from cluster.types.media import Modality


class EncoderFits:
    """Units are embedding rows before pooling. The context of a step is not used."""

    def __init__(self, large_rows: int):
        self.encode = {modality: StepFit(large_rows, 1) for modality in Modality}  # of a call
        # Of an item, on its thread.
        self.prepare = {modality: StepFit(large_rows, 1) for modality in Modality}

    def rows_of_a_batch(self, modality: Modality, num_ready: int) -> float:
        """Returns `rows_of_a_call` by this device's fit."""
        fixed_s, per_row_s = self._parts(modality)
        return float(rows_of_a_call(num_ready, fixed_s, per_row_s)) if per_row_s else math.inf

    def rows_within(self, modality: Modality, seconds: float) -> float:
        """Rows of a call that lasts no longer; 0 before the first observation."""
        fixed_s, per_row_s = self._parts(modality)
        return max(0.0, seconds - fixed_s) / per_row_s if per_row_s else 0.0

    def _parts(self, modality: Modality) -> tuple[float, float]:
        curve = self.encode[modality].curve() or Curve(0.0, 0.0)
        return curve.fixed_s, curve.per_unit_s
