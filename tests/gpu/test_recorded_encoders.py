"""Recorded encoder calls on a GPU give the rows of unrecorded ones, bit by bit, and calls of other forms in
between change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cluster.model.cuda.capture import Replay, capture_cuda
from cluster.model.cuda.merging import merge_inputs
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.recorded_calls import InputForm
from cluster.model.cuda.tower_blocks import optimise_tower_blocks
from cluster.model.encoder import EncoderModel
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.gpu.device import triton_device
from tests.unit.model.test_cuda_packed_attention import PACKED

DEVICE = triton_device()
# tiles, sizes with masks of blocks, windows of sound under a mask; packed
OTHERS = ("gemma3", "llava", "mistral3", "qwen2_audio")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*sorted(PACKED), *OTHERS])
def test_recorded_rows_are_those_of_plain_calls(name: str, dtype: torch.dtype, caplog) -> None:
    caplog.set_level("INFO")
    case = MEDIA_FAMILIES[name]()
    nn.Module.to(case.model, DEVICE, dtype)
    merge_inputs(case.model, DEVICE)
    optimise_tower_blocks(case.model)
    optimise_packed_attention(case.model)
    encoder = EncoderModel.from_model(case.model)
    calls = []
    for modality, item in [pair for request in case.requests for pair in request.items]:
        item = {key: value.to(DEVICE) for key, value in item.items()}
        other = {key: 1 - value if value.is_floating_point() else value for key, value in item.items()}
        calls += [(modality, [item, item]), (modality, [other, other])]
    expected = [encoder.encode(*call) for call in calls]
    forms = {InputForm.of(*call) for call in calls}
    capture, recorded = capture_cuda(is_alone=False), []

    def counted(work: Callable[[], Tensor]) -> Replay:
        replay = capture(work)
        recorded.append(replay)
        return replay

    encoder.record(counted)
    for _ in range(2):  # a recording that fails is tried once more
        for call in calls:
            encoder.encode(*call)
        while encoder.record_next():
            pass
    if len(recorded) != len(forms):
        pytest.fail(f"{len(recorded)} of {len(forms)} forms are recorded:\n{caplog.text}", pytrace=False)
    for _ in range(2):
        for call, own in zip(calls, expected, strict=True):
            for rows, alone in zip(encoder.encode(*call), own, strict=True):
                assert torch.equal(rows, alone)
