"""What an encoder learns before the first request."""

from __future__ import annotations

import logging

import pytest
import torch

from cluster.types.media import Modality
from cluster.worker.cpu_slots import no_cpu_slots
from encoder_service.calls import EncoderFits
from encoder_service.runner import Prepared
from encoder_service.warm_up import warm_up
from tests.fakes.clock import ManualClock


class SlowRunner:
    """A row is a thousand numbers of the item; a millisecond of preprocessing and two in the encoder, on top
    of 10 and 20."""

    def __init__(self, clock: ManualClock, breaks_on: Modality | None = None):
        self._clock, self._breaks_on = clock, breaks_on
        self.num_warm_up_calls = 0

    def preprocess(self, modality, array, options):
        num_rows = max(1, array.size // 1000)
        self._clock.at += 0.010 + 0.001 * num_rows
        return Prepared({"rows": torch.zeros(num_rows, 1)}, 1)

    def encode(self, modality, pieces):
        if modality is self._breaks_on:
            raise RuntimeError("this family wants no blank items")
        (piece,) = pieces
        assert piece.is_whole
        rows = piece.prepared.tensors["rows"]
        self._clock.at += 0.020 + 0.002 * len(rows)
        return [rows]


@pytest.mark.parametrize("modality", Modality)
def test_both_curves_of_every_modality_are_there(modality):
    clock, fits = ManualClock(), EncoderFits(16_384)
    warm_up(SlowRunner(clock), [modality], fits, no_cpu_slots(clock), clock)  # type: ignore[arg-type]
    encode, prepare = fits.encode[modality].curve(), fits.prepare[modality].curve()
    assert encode is not None and prepare is not None
    assert encode.seconds(50) == pytest.approx(0.12, rel=0.3)
    assert prepare.seconds(50) == pytest.approx(0.06, rel=0.3)


def test_a_modality_that_cannot_be_tried_is_left_out_and_named_in_the_log(caplog):
    clock, fits = ManualClock(), EncoderFits(16_384)
    runner = SlowRunner(clock, breaks_on=Modality.VIDEO)
    with caplog.at_level(logging.WARNING):
        warm_up(runner, list(Modality), fits, no_cpu_slots(clock), clock)  # type: ignore[arg-type]
    assert fits.encode[Modality.VIDEO].curve() is None
    assert fits.encode[Modality.IMAGE].curve() is not None and fits.encode[Modality.AUDIO].curve() is not None
    assert "video" in caplog.text and "no blank items" in caplog.text
