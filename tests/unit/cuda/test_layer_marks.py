"""Recorded steps that report when each layer's K and V are written, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from cluster.model.cuda import graphs
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.cuda.layer_marks import LayerMarks
from cluster.model.cuda.step_inputs import StepSizes
from tests.fakes.cuda_device import SimulatedCuda
from tests.unit.cuda.recorded_and_plain import SIZES, Compared
from tests.unit.cuda.test_recorded_steps import Answering, mixed_steps, text_model


def test_a_recorded_step_reports_its_layers(device: SimulatedCuda) -> None:
    compared = Compared(text_model(device), RecordedSizes([], SIZES.mixed, has_marks=True))
    told: list[tuple[int, Callable[[], bool]]] = []

    def on_layer(layer_idx: int, ready: Callable[[], bool] | None = None, /) -> None:
        assert ready is not None and ready(), "the simulated device has computed the replay"
        told.append((layer_idx, ready))

    for number, chunks in enumerate(mixed_steps()):
        compared.graphed.forward(chunks, compared.kvs[0], on_layer)
        compared.model.forward(chunks, compared.kvs[1])
        assert [layer for layer, _ in told] == [0, 1] * (number + 1)
        assert all(ready() for _, ready in told)
    compared.check_kv()


def test_a_layer_is_written_when_its_replay_has_come_there(device: SimulatedCuda) -> None:
    """Whatever later replays have been launched meanwhile."""
    marks, told = LayerMarks(torch.device("cuda"), 2), []
    for layer_idx in (0, 1):  # the recording's own runs
        marks.record(layer_idx)
    for _ in range(2):
        marks.begin()
        marks.report(lambda layer_idx, ready=None, /: told.append(ready))
        assert not any(ready() for ready in told)
    marks.record(0)  # as the second replay does it
    assert [ready() for ready in told] == [True, False] * 2
    marks.record(1)
    assert all(ready() for ready in told)


def test_steps_of_a_worker_without_answers(device: SimulatedCuda) -> None:
    sizes = RecordedSizes.of_prompts(600)
    assert sizes.mixed[-1] == StepSizes(640, 128, 128) and sizes.has_marks
    with mock.patch.object(graphs, "MIXED_TOKENS", (16, 32)):
        recording = recording_of(text_model(device), RecordedSizes.of_prompts(20))
    assert recording is not None and not recording.sizes.answers
    no_mixed = text_model(device, attention=Answering())
    assert recording_of(no_mixed, RecordedSizes.of_prompts(20)) is None
