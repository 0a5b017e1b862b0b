"""Workers of tests know how fast they are without measuring it: their warm-up asks a scripted device, on a
clock of its own. What doors and engines predict at first then does not depend on how busy the machine is, and
a cluster of the demo model starts at half the cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from cluster.engine.warm_up import warm_up_answers, warm_up_prompts
from cluster.types.media import MediaOptions, Modality
from cluster.worker.cpu_slots import no_cpu_slots
from encoder_service.runner import Piece, Prepared
from encoder_service.warm_up import warm_up
from tests.fakes.clock import ManualClock

STEP_S = 0.005
PROMPT_TOKEN_S = 1e-4
SEQUENCE_S, SEEN_TOKEN_S = 3e-4, 1e-6
ROW_S, PREPARED_ROW_S = 5e-4, 1e-4
VALUES_OF_A_ROW = 1000  # of an item's array


class ScriptedDevice:
    """As a core of a few years ago computes the demo model."""

    def __init__(self) -> None:
        self.clock = ManualClock()

    def room_for_prompts(self, answers: Sequence[object]) -> None:
        """No step is recorded."""

    def warm_up_prompt(self, num_tokens: int, block_table: Sequence[int]) -> None:
        self.clock.at += STEP_S + num_tokens * PROMPT_TOKEN_S

    def warm_up_answers(self, num_sequences: int, context: int, block_table: Sequence[int]) -> None:
        self.clock.at += STEP_S + num_sequences * (SEQUENCE_S + context * SEEN_TOKEN_S)

    def preprocess(self, modality: Modality, array: np.ndarray, options: MediaOptions) -> Prepared:
        num_rows = max(1, array.size // VALUES_OF_A_ROW)
        self.clock.at += num_rows * PREPARED_ROW_S
        return Prepared({"rows": torch.empty(num_rows, 0)}, 1)

    def encode(self, modality: Modality, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        rows = [piece.prepared.tensors["rows"] for piece in pieces]
        self.clock.at += STEP_S + sum(map(len, rows)) * ROW_S
        return rows


@contextmanager
def known_speeds() -> Iterator[None]:
    """For workers that are made meanwhile."""

    def prompts(_runner: Any, blocks: Any, budget: Any, _slots: Any, max_tokens: int) -> None:
        device: Any = ScriptedDevice()
        warm_up_prompts(device, blocks, budget, no_cpu_slots(device.clock), max_tokens)

    def answers(_runner: Any, blocks: Any, fit: Any, _slots: Any, *limits: int) -> None:
        device: Any = ScriptedDevice()
        warm_up_answers(device, blocks, fit, no_cpu_slots(device.clock), *limits)

    def encoder(_runner: Any, modalities: Iterable[Modality], fits: Any, _slots: Any, _clock: Any) -> None:
        device: Any = ScriptedDevice()
        warm_up(device, modalities, fits, no_cpu_slots(device.clock), device.clock)

    with (
        patch("cluster.engine.worker.warm_up_prompts", prompts),
        patch("cluster.engine.worker.warm_up_answers", answers),
        patch("encoder_service.service.warm_up", encoder),
    ):
        yield
