"""Fused blocks of towers in Triton's interpreter: the kernels equal transformers' formulas, a row has the
same bits in any company, and towers of every form give their own rows. The interpreter has to be asked for:
TRITON_INTERPRET=1."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from cluster.model.cuda.forms import activation_of, norm_of
from cluster.model.cuda.layer_calls import ActivationKind, GateActivation
from cluster.model.cuda.merging import merge_inputs
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.tower_blocks import optimise_tower_blocks
from cluster.model.cuda.tower_calls import LayerNorm, QkvHeads, activate, add_norm, rotate
from cluster.model.encoder import EncoderModel
from tests.fakes.slow_params import often
from tests.flow.tiny_media_models import MEDIA_FAMILIES

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
    ),
    pytest.mark.usefixtures("seeded"),
]
# Families whose blocks are fused, and how many.
FUSED = {
    "qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2, "qwen3_5": 2, "qwen2_5_omni": 4, "qwen3_omni": 4,
    "qwen3_asr": 2, "glm4v": 2, "glm_ocr": 2, "exaone4_5": 2, "paddleocr_vl": 2, "kimi_k25": 2,
    "cosmos3_edge": 2, "muse_glimmer": 2, "muse_spark": 2, "hyperclovax_vision_v2": 2, "cohere_compass": 2,
    "llava": 3, "gemma3": 3, "idefics3": 2, "lfm2_vl": 2, "granite_docling": 3, "qwen2_audio": 2,
    "voxtral": 2, "audioflamingo3": 2, "moss_transcribe_diarize": 2, "mistral3": 2,
}  # fmt: skip
# rotated and gated; sound; fewer KV heads; quick GELU; one length under a mask; one length, rotated
ALWAYS = ["qwen2_5_vl", "qwen2_5_omni", "exaone4_5", "llava", "lfm2_vl", "mistral3"]
DTYPES = (torch.float32, torch.float16)  # the interpreter cuts bfloat16 off
HIDDEN = 96


def rms_norm(width: int, dtype: torch.dtype) -> Any:
    norm = hf.models.glm_ocr.modeling_glm_ocr.GlmOcrRMSNorm(width).to(dtype)
    norm.weight.copy_(1 + 0.3 * torch.randn(width))
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_rms", [True, False])
def test_the_sum_is_exact_and_its_norm_is_the_modules(is_rms: bool, dtype: torch.dtype) -> None:
    own: Any = rms_norm(HIDDEN, dtype) if is_rms else nn.LayerNorm(HIDDEN).to(dtype)
    for parameter in own.parameters():
        parameter.add_(0.3 * torch.randn(HIDDEN).to(dtype))
    norm: Any = norm_of(own) if is_rms else LayerNorm(own.weight, own.bias, own.eps)
    x, added = (3 + torch.randn(5, HIDDEN)).to(dtype), torch.randn(5, HIDDEN).to(dtype)
    before = x.clone()
    total, normed = add_norm(x, added, norm)
    assert torch.equal(total, x + added) and torch.equal(x, before)
    same, alone = add_norm(x, None, norm)
    assert same is x
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for actual, expected in ((normed, own(total)), (alone, own(x))):
        torch.testing.assert_close(actual, expected, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_query", "num_kv", "width"), [(4, 4, 80), (20, 20, 24), (6, 2, 12)])
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_are_normed_and_rotated_as_the_family_does(num_query, num_kv, width, has_norms, dtype) -> None:
    qkv = torch.randn(7, (num_query + 2 * num_kv) * width).to(dtype)
    angles = torch.randn(7, width)
    norms = [rms_norm(width, dtype) for _ in range(2)] if has_norms else []
    heads = QkvHeads(num_query, num_kv, width, *map(norm_of, norms))
    actual = rotate(qkv, heads, (angles.cos(), angles.sin()))
    query, key, _ = qkv.view(7, -1, width).split([num_query, num_kv, num_kv], dim=1)
    if has_norms:
        query, key = norms[0](query), norms[1](key)
        only = torch.cat([query, key], dim=1)
        torch.testing.assert_close(rotate(qkv, heads, None), only, rtol=1e-2, atol=1e-5)
    rotated = hf.models.glm_ocr.modeling_glm_ocr.apply_rotary_pos_emb_vision
    expected = torch.cat(rotated(query, key, angles.cos(), angles.sin()), dim=1)
    if has_norms:
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=2e-5 if dtype == torch.float32 else 2e-2)
    else:
        assert torch.equal(actual, expected)


def test_sequences_of_one_length_share_their_angles() -> None:
    qkv, angles = torch.randn(6, 3 * 2 * 16), torch.randn(3, 16)
    heads = QkvHeads(2, 2, 16)
    together = rotate(qkv, heads, (angles.cos(), angles.sin()))
    apart = [rotate(rows, heads, (angles.cos(), angles.sin())) for rows in qkv.split(3)]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (GateActivation(ActivationKind.GELU), F.gelu),
        (GateActivation(ActivationKind.GELU_TANH), lambda x: F.gelu(x, approximate="tanh")),
        (GateActivation(ActivationKind.SILU, alpha=1.702), lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_an_activation_alone_is_torchs(activation: GateActivation, formula) -> None:
    x = 3 * torch.randn(11, 300)
    torch.testing.assert_close(activate(x, activation), formula(x), rtol=1e-5, atol=1e-6)
    rounded = x.half()
    torch.testing.assert_close(activate(rounded, activation), formula(rounded), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    width = 24
    rows, added = torch.randn(2, 9, HIDDEN).to(dtype)
    weight, shift = torch.randn(2, HIDDEN).to(dtype)
    layer_norm = LayerNorm(weight, shift, 1e-6)
    norm, angles = norm_of(rms_norm(HIDDEN, dtype)), torch.randn(9, width)
    head_norms = [norm_of(rms_norm(width, dtype)) for _ in range(2)]
    heads, qkv = QkvHeads(4, 4, width, *head_norms), torch.randn(9, 12 * width).to(dtype)
    gelu = activation_of(nn.GELU(), rows)
    assert norm is not None and gelu is not None

    def computed(own: slice) -> list[Tensor]:
        rotary = (angles[own].cos(), angles[own].sin())
        sums = (*add_norm(rows[own], added[own], norm), *add_norm(rows[own], added[own], layer_norm))
        return [*sums, rotate(qkv[own], heads, rotary), activate(rows[own], gelu)]

    together = computed(slice(0, 9))
    for own in (slice(0, 1), slice(1, 6), slice(6, 9)):
        assert all(map(torch.equal, computed(own), [each[own] for each in together]))


@pytest.mark.parametrize("name", often(sorted(FUSED), ALWAYS))
def test_a_tower_of_fused_blocks_gives_its_own_rows(name: str, caplog) -> None:
    caplog.set_level("INFO")
    case = MEDIA_FAMILIES[name]()
    own = EncoderModel.from_model(case.model)
    model: Any = copy.deepcopy(case.model)
    encoder = EncoderModel.from_model(model)
    merge_inputs(model.model, torch.device("cpu"))
    assert optimise_tower_blocks(model.model) == FUSED[name]
    assert optimise_packed_attention(model.model) == 0 and "one call for each segment" not in caplog.text
    for modality, some in case.items().items():
        actual, expected = encoder.encode(modality, some[:2]), own.encode(modality, some[:2])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
