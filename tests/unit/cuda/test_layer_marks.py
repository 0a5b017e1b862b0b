"""Recorded steps that report when each layer's K and V are written, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from cluster.model.cuda import graphs
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.cuda.step_inputs import StepSizes
from tests.fakes.cuda_device import SimulatedCuda
from tests.unit.cuda.recorded_and_plain import SIZES, Compared
from tests.unit.cuda.test_recorded_steps import Answering, mixed_steps, text_model


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as simulated:
        yield simulated


def test_a_recorded_step_reports_its_layers(device: SimulatedCuda) -> None:
    """Each when its K and V are written, and what came before the next step at once."""
    compared = Compared(text_model(device), RecordedSizes([], SIZES.mixed, has_marks=True))
    told: list[tuple[int, Callable[[], bool]]] = []

    def on_layer(layer_idx: int, ready: Callable[[], bool] | None = None, /) -> None:
        assert ready is not None and not ready()
        told.append((layer_idx, ready))

    for number, chunks in enumerate(mixed_steps()):
        compared.graphed.forward(chunks, compared.kvs[0], on_layer)
        compared.model.forward(chunks, compared.kvs[1])
        assert [layer for layer, _ in told] == [0, 1] * (number + 1)
        assert [ready() for _, ready in told] == [True] * 2 * number + [False] * 2
        if number % 2:
            torch.cuda.current_stream().synchronize()
            assert all(ready() for _, ready in told)
    compared.check_kv()


def test_steps_of_a_worker_without_answers(device: SimulatedCuda) -> None:
    sizes = RecordedSizes.of_prompts(600)
    assert sizes.mixed[-1] == StepSizes(640, 128, 128) and sizes.has_marks
    with mock.patch.object(graphs, "MIXED_TOKENS", (16, 32)):
        recording = recording_of(text_model(device), RecordedSizes.of_prompts(20))
    assert recording is not None and not recording.sizes.answers
    no_mixed = text_model(device, attention=Answering())
    assert recording_of(no_mixed, RecordedSizes.of_prompts(20)) is None
