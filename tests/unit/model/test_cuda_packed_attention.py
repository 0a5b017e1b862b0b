"""Attention over packed segments in Triton's interpreter: the kernels equal torch's attention of each
segment, and every packed tower gives its own rows. The interpreter has to be asked for:
TRITON_INTERPRET=1."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cuda.packed_attention import PackedAttention, tiles_for
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.encoder import EncoderModel
from tests.fakes.slow_params import often
from tests.flow.tiny_media_models import MEDIA_FAMILIES

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
# Families with packed towers, and how many blocks of them.
PACKED = {
    "qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2, "qwen3_vl_moe": 2, "qwen2_5_omni": 4, "qwen3_omni": 4,
    "glm4v": 2, "glm4v_moe": 2, "glm46v": 2, "glmga": 2, "glm_ocr": 2, "exaone4_5": 2, "paddleocr_vl": 2,
    "cosmos3_omni": 2, "cosmos3_edge": 2, "cohere_compass": 2, "hunyuan_vl": 2, "kimi_k25": 2,
    "hyperclovax_vision_v2": 2, "muse_glimmer": 2, "muse_spark": 2, "qwen3_asr": 2,
}  # fmt: skip
LENGTHS = (70, 5, 1, 0, 64, 130)
WIDTHS = (12, 64, 72, 80, 128)


def random_rows(
    lengths: Sequence[int], width: int, dtype=torch.float32, heads: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V as views of one product, and where the segments begin."""
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(sum(lengths), 3, heads, width, generator=generator).to(dtype)
    query, key, value = product.unbind(1)
    return query, key, value, torch.tensor([0, *lengths]).cumsum(0).int()


def by_torch(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float) -> Tensor:
    segments = [
        [rows[start:end].transpose(0, 1)[None] for rows in (query, key, value)]
        for start, end in pairwise(starts.tolist())
        if start < end
    ]
    outs = [
        F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)[0] for q, k, v in segments
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


def check(rows: tuple[Tensor, Tensor, Tensor, Tensor], tolerance: float = 1e-6) -> None:
    actual, expected = PackedAttention().attend(*rows, 0.2), by_torch(*rows, 0.2)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype and actual.is_contiguous()
    assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_segment_equals_its_own_attention(width: int) -> None:
    check(random_rows(LENGTHS, width))


def test_heads_may_share_keys_and_values() -> None:
    query, key, value, starts = random_rows(LENGTHS, 32, heads=4)
    check((query, key[:, ::2], value[:, 1::2], starts))


def test_half_precision_rounds_as_little_as_torch() -> None:
    query, key, value, starts = random_rows(LENGTHS, 80, torch.float16)
    actual = PackedAttention().attend(query, key, value, starts, 0.2).float()
    expected = by_torch(query.float(), key.float(), value.float(), starts, 0.2)
    assert (actual - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_in_any_company(dtype) -> None:
    query, key, value, starts = random_rows(LENGTHS, 72, dtype)
    together = PackedAttention().attend(query, key, value, starts, 0.2)
    for start, end in pairwise(starts.tolist()):
        if start < end:
            own, whole = slice(start, end), torch.tensor([0, end - start])
            alone = PackedAttention().attend(query[own], key[own], value[own], whole, 0.2)
            assert torch.equal(alone, together[start:end])


def test_more_segments_than_one_pass_are_cut() -> None:
    check(random_rows([3, 17] * 35, 16))


@pytest.mark.parametrize("width", [12, 16, 40, 64, 72, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("is_exact", [False, True])
def test_runs_hold_a_head_and_less_than_twice_as_much(width: int, is_exact: bool) -> None:
    tiles = tiles_for(width, is_exact)
    assert width <= tiles.run + tiles.rest < max(2 * width, 32)


@pytest.mark.parametrize(
    "name", often(sorted(PACKED), ["qwen2_5_vl", "qwen2_5_omni", "exaone4_5", "hunyuan_vl", "qwen3_asr"])
)
def test_a_packed_tower_gives_its_own_rows(name: str) -> None:
    case = MEDIA_FAMILIES[name]()
    own = EncoderModel.from_model(case.model)
    model: Any = copy.deepcopy(case.model)
    encoder = EncoderModel.from_model(model)
    assert optimise_packed_attention(model.model) == PACKED[name]
    for modality, some in case.items().items():
        actual, expected = encoder.encode(modality, some), own.encode(modality, some)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
