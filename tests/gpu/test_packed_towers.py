"""Packed towers of every family on a GPU: with one launch a block they give the rows that they give with
transformers' own attention, and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.model.cuda.packed_attention import PackedAttention
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.encoder import EncoderModel
from cluster.model.layers.trial import agree
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.gpu.device import triton_device
from tests.unit.model.test_cuda_packed_attention import LENGTHS, PACKED, WIDTHS, by_torch, random_rows

pytestmark = pytest.mark.usefixtures("exact_products")
DEVICE = triton_device()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", sorted(PACKED))
def test_a_packed_tower_gives_its_own_rows(name: str, dtype: torch.dtype) -> None:
    case = MEDIA_FAMILIES[name]()
    nn.Module.to(case.model, DEVICE, dtype)
    encoder = EncoderModel.from_model(case.model)
    items = case.items()
    expected = {modality: encoder.encode(modality, some) for modality, some in items.items()}
    assert optimise_packed_attention(case.model) == PACKED[name]
    for modality, some in items.items():
        for actual, own in zip(encoder.encode(modality, some), expected[modality], strict=True):
            assert agree(actual, own, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [*WIDTHS, 256])
def test_segments_equal_their_own_attention(width: int, dtype: torch.dtype) -> None:
    lengths = (*LENGTHS, 4096, 577)
    query, key, value, starts = (rows.to(DEVICE) for rows in random_rows(lengths, width, dtype))
    actual = PackedAttention().attend(query, key, value, starts, 0.2)
    expected = by_torch(query.float(), key.float(), value.float(), starts, 0.2)
    assert agree(actual.float(), expected, TOLERANCES[dtype])
    first = sum(LENGTHS)
    own, whole = slice(first, first + 4096), torch.tensor([0, 4096], device=DEVICE)
    alone = PackedAttention().attend(query[own], key[own], value[own], whole, 0.2)
    assert torch.equal(alone, actual[own])
