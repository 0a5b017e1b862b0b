"""What an encoder worker learns of its own speed, by modality. Owned by the engine's thread."""

from __future__ import annotations

from cluster.scheduling.fit import StepFit
from cluster.types.media import Modality


class EncoderFits:
    """Units are embedding rows before pooling; a context means nothing."""

    def __init__(self, large_rows: int):
        self.encode = {modality: StepFit(large_rows, 1) for modality in Modality}  # a call
        self.prepare = {modality: StepFit(large_rows, 1) for modality in Modality}  # an item, on its thread
