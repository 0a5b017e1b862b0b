"""What an encoder worker learns of its own speed, by modality. Owned by the engine's thread."""

from __future__ import annotations

from cluster.scheduling.fit import StepFit
from cluster.types.media import Modality


class EncoderFits:
    """Units are embedding rows before pooling. The context of a step is not used."""

    def __init__(self, large_rows: int):
        self.encode = {modality: StepFit(large_rows, 1) for modality in Modality}  # of a call
        # Of an item, on its thread.
        self.prepare = {modality: StepFit(large_rows, 1) for modality in Modality}
