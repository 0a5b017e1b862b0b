"""Fused blocks of towers of every family on a GPU give the rows that the modules give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.model.cuda.merging import merge_inputs
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.tower_blocks import optimise_tower_blocks
from cluster.model.encoder import EncoderModel
from cluster.model.layers.trial import agree
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.gpu.device import triton_device
from tests.unit.model.test_cuda_tower_blocks import FUSED

pytestmark = pytest.mark.usefixtures("exact_products")
DEVICE = triton_device()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_tower_of_fused_blocks_gives_its_own_rows(name: str, dtype: torch.dtype) -> None:
    case = MEDIA_FAMILIES[name]()
    nn.Module.to(case.model, DEVICE, dtype)
    encoder = EncoderModel.from_model(case.model)
    items = case.items()
    expected = {modality: encoder.encode(modality, some) for modality, some in items.items()}
    merge_inputs(case.model, DEVICE)
    assert optimise_tower_blocks(case.model) == FUSED[name]
    assert optimise_packed_attention(case.model) == 0
    for modality, some in items.items():
        for actual, own in zip(encoder.encode(modality, some), expected[modality], strict=True):
            assert agree(actual, own, TOLERANCES[dtype])
