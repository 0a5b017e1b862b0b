"""Before the first request: measures how long an encoder call and preprocessing take, with blank items of
each modality.

Nothing is decoded here, because a blank file says nothing about the decoding of real files. The first real
items add that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from cluster.clock import Clock
from cluster.types.media import MediaOptions, Modality
from cluster.worker.cpu_slots import CpuSlots
from encoder_service.calls import EncoderFits
from encoder_service.runner import EncoderRunner, Piece

logger = logging.getLogger(__name__)


def warm_up(
    runner: EncoderRunner,
    modalities: Iterable[Modality],
    fits: EncoderFits,
    cpu_slots: CpuSlots,
    clock: Clock,
) -> None:
    """Runs on the caller's thread and blocks for a few small calls. A modality that cannot be encoded this
    way is skipped, with a warning in the log."""
    for modality in modalities:
        small, larger = _blank_items(modality)
        try:
            _run(runner, modality, small, cpu_slots, clock)  # the first call includes what is done only once
            for array in (small, larger) * 2:
                num_rows, prepare_s, encode_s = _run(runner, modality, array, cpu_slots, clock)
                fits.prepare[modality].observe(num_rows, 0.0, prepare_s)
                fits.encode[modality].observe(num_rows, 0.0, encode_s)
        except Exception as error:  # the model's code may raise anything on unusual input
            logger.warning("the encoder was not warmed up for %s: %r", modality, error)


def _run(
    runner: EncoderRunner, modality: Modality, array: np.ndarray, cpu_slots: CpuSlots, clock: Clock
) -> tuple[int, float, float]:
    """(embedding rows, seconds of preprocessing, seconds of the call)"""
    began_at = clock.now()
    prepared = runner.preprocess(modality, array, MediaOptions())
    prepare_s = clock.now() - began_at
    with cpu_slots.acquire():
        (rows,) = runner.encode(modality, [Piece(prepared, MediaOptions(), 0, prepared.num_units)])
    return len(rows), prepare_s, cpu_slots.ran_s


def _blank_items(modality: Modality) -> tuple[np.ndarray, np.ndarray]:
    """A small item and a larger one, in the form that `cluster.media.decoders` gives."""
    match modality:
        case Modality.IMAGE:
            return np.zeros((64, 64, 3), np.uint8), np.zeros((256, 256, 3), np.uint8)
        case Modality.VIDEO:
            return np.zeros((4, 64, 64, 3), np.uint8), np.zeros((8, 128, 128, 3), np.uint8)
        case Modality.AUDIO:
            return np.zeros(16_000, np.float32), np.zeros(4 * 16_000, np.float32)
