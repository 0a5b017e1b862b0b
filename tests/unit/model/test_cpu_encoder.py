"""Encoder blocks in one native call against transformers' own: families, variants, dtypes, sequences and
masks, and what must stay as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from cluster.errors import InternalError
from cluster.model.cpu.encoder_layer import NativeEncoderLayer
from cluster.model.cpu.encoder_patches import NativePatches, optimise_patches
from cluster.model.cpu.encoder_search import optimise_encoder_layers
from cluster.model.cpu.library import Kernels
from cluster.model.encoder import EncoderModel
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.unit.model.native_kernels import best_kernels, each_dtype, each_variant, needs_kernels

LENGTHS = (64, 3, 1, 140)  # of packed sequences
HIDDEN = 48  # a width that fills no vector of the widest kernels

_VISION: dict[str, Any] = {"depth": 2, "hidden_size": HIDDEN, "intermediate_size": 70, "num_heads": 4}
_LAYERS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 70,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
}
_AUDIO: dict[str, Any] = {"d_model": HIDDEN, "encoder_ffn_dim": 70, "encoder_attention_heads": 4}


def _block(block: Callable[..., nn.Module], config: Any) -> nn.Module:
    config._attn_implementation = "sdpa"
    return block(config)


def _qwen2_vl() -> nn.Module:
    vision = hf.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig
    return _block(
        hf.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLVisionBlock,
        vision(embed_dim=HIDDEN, num_heads=4, mlp_ratio=2),
    )


PACKED: dict[str, Callable[[], nn.Module]] = {
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": lambda: _block(
        hf.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock,
        hf.Qwen2_5_VLConfig(vision_config=_VISION).vision_config,
    ),
    "qwen3-vl": lambda: _block(
        hf.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionBlock,
        hf.Qwen3VLConfig(vision_config=_VISION).vision_config,
    ),
    "omni vision": lambda: _block(
        hf.models.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniVisionBlock,
        hf.Qwen2_5OmniThinkerConfig(vision_config=_VISION).vision_config,
    ),
    "omni audio": lambda: _block(
        hf.models.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniAudioEncoderLayer,
        hf.Qwen2_5OmniThinkerConfig(audio_config=_AUDIO).audio_config,
    ),
}
PADDED: dict[str, Callable[[], nn.Module]] = {
    "clip": lambda: _block(hf.models.clip.modeling_clip.CLIPEncoderLayer, hf.CLIPVisionConfig(**_LAYERS)),
    "siglip": lambda: _block(
        hf.models.siglip.modeling_siglip.SiglipEncoderLayer, hf.SiglipVisionConfig(**_LAYERS)
    ),
    "whisper": lambda: _block(
        hf.models.qwen2_audio.modeling_qwen2_audio.Qwen2AudioEncoderLayer,
        hf.Qwen2AudioConfig(audio_config=_AUDIO).audio_config,
    ),
}

pytestmark = [needs_kernels, pytest.mark.usefixtures("seeded")]


def tower_of(block: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two blocks with weights that are not small, biases and norms included."""
    tower = nn.ModuleList([block(), block()]).eval().to(dtype)
    for parameter in tower.parameters():
        mean = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
        parameter.copy_(mean + 0.1 * torch.randn(parameter.shape))
    return nn.Sequential(tower)


def native_of(tower: nn.Module, kernels: Kernels = best_kernels) -> nn.Module:
    native = copy.deepcopy(tower)
    optimise_encoder_layers(native, kernels)
    return native


def num_native(tower: nn.Module) -> int:
    return sum(isinstance(module.__dict__.get("forward"), NativeEncoderLayer) for module in tower.modules())


def run(tower: Any, x: Tensor, **arguments: Any) -> Tensor:
    for block in tower[0]:
        x = block(x, **arguments)
        x = x[0] if isinstance(x, tuple) else x
    return x


def packed_arguments(name: str, lengths: Sequence[int]) -> dict[str, Any]:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    if name == "omni audio":
        return {"cu_seqlens": starts}
    angles = torch.cat([torch.arange(length) for length in lengths])[:, None] * torch.linspace(0.1, 1, 6)
    angles = torch.cat([angles, angles], dim=-1)
    return {"cu_seqlens": starts, "position_embeddings": (angles.cos(), angles.sin())}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    return 2e-2 if dtype == torch.bfloat16 else 2e-6


@each_variant
@each_dtype
@pytest.mark.parametrize("name", PACKED)
def test_native_blocks_equal_the_modules_over_packed_sequences(kernels: Kernels, dtype, name):
    tower = tower_of(PACKED[name], dtype)
    native = native_of(tower, kernels)
    assert num_native(native) == 2
    assert not list(native.parameters())  # weights are held once
    x, arguments = torch.randn(sum(LENGTHS), HIDDEN).to(dtype), packed_arguments(name, LENGTHS)
    actual, expected = run(native, x, **arguments), run(tower, x, **arguments)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < tolerance(dtype)


@each_variant
@each_dtype
@pytest.mark.parametrize("name", PADDED)
def test_native_blocks_equal_the_modules_over_masked_sequences(kernels: Kernels, dtype, name):
    tower = tower_of(PADDED[name], dtype)
    native = native_of(tower, kernels)
    assert num_native(native) == 2
    x = torch.randn(3, 37, HIDDEN).to(dtype)
    mask = (torch.arange(37) != 5) & (torch.arange(37) < torch.tensor([37, 20, 9])[:, None])
    for given in (None, mask[:, None, None].expand(3, 1, 37, 37)):
        actual, expected = run(native, x, attention_mask=given), run(tower, x, attention_mask=given)
        assert relative_error(actual, expected) < tolerance(dtype)


@each_variant
@pytest.mark.parametrize("name", ["qwen2.5-vl", "omni audio"])
def test_a_sequence_depends_neither_on_the_others_nor_on_the_number_of_threads(kernels: Kernels, name):
    native = native_of(tower_of(PACKED[name]), kernels)
    lengths = (700, *LENGTHS)
    x = torch.randn(sum(lengths), HIDDEN)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = run(native, x, **packed_arguments(name, lengths))
        torch.set_num_threads(1)
        assert torch.equal(run(native, x, **packed_arguments(name, lengths)), together)
    finally:
        torch.set_num_threads(before)
    apart = [run(native, rows, **packed_arguments(name, [len(rows)])) for rows in x.split(lengths)]
    assert torch.equal(torch.cat(apart), together)


def test_a_mask_of_another_form_is_refused():
    native = native_of(tower_of(PADDED["clip"]))
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(InternalError):
        run(native, torch.randn(1, 4, HIDDEN), attention_mask=mask)


@pytest.mark.parametrize("rows", [4, 6])
def test_sequences_that_do_not_cover_the_rows_are_refused(rows: int):
    native = native_of(tower_of(PACKED["omni audio"]))
    with pytest.raises(InternalError):
        run(native, torch.randn(rows, HIDDEN), cu_seqlens=torch.tensor([0, 5]))


def _shifted(block: Any) -> None:
    block.norm1.weight += 1
    block.norm1.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], block.norm1.weight - 1, 1e-6)


def _of_another_scale(block: Any) -> None:
    block.attn.scaling = 1.0


def _with_one_more_weight(block: Any) -> None:
    block.scale = nn.Parameter(torch.ones(HIDDEN))


def _heard(block: Any) -> None:
    block.mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_shifted, _of_another_scale, _with_one_more_weight, _heard])
def test_a_block_that_computes_something_else_stays(change: Callable[[nn.Module], None]):
    tower: Any = tower_of(PACKED["qwen2.5-vl"])
    change(tower[0][1])
    assert optimise_encoder_layers(tower, best_kernels) == 1
    assert num_native(tower[0][1]) == 0


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni", "gemma3", "idefics3", "qwen2_audio"])
def test_the_rows_of_a_family_stay_the_same(name: str):
    case = MEDIA_FAMILIES[name]()
    modules = EncoderModel.from_model(case.model)
    model: Any = copy.deepcopy(case.model)
    native = EncoderModel.from_model(model)
    assert optimise_encoder_layers(model.model, best_kernels) >= 2
    assert optimise_patches(model.model, best_kernels) >= (name != "qwen2_audio")
    for modality, some in case.items().items():
        for actual, expected in zip(
            native.encode(modality, some), modules.encode(modality, some), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@each_variant
@each_dtype
@pytest.mark.parametrize(
    "convolution",
    [nn.Conv2d(3, 10, 5, stride=5), nn.Conv3d(3, 6, (2, 4, 4), stride=(2, 4, 4), bias=False)],
    ids=["2d", "3d"],
)
def test_patches_equal_the_convolution(kernels: Kernels, dtype, convolution: nn.Module):
    tower = nn.Sequential(copy.deepcopy(convolution).to(dtype))
    native = copy.deepcopy(tower)
    assert optimise_patches(native, kernels) == 1
    kernel = cast(nn.Conv2d, convolution).kernel_size
    for sizes in (kernel, [3 * size + 1 for size in kernel], [2 * kernel[0], *kernel[1:]]):
        x = torch.randn(4, 3, *sizes).to(dtype)
        actual, expected = native(x), tower(x)
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < tolerance(dtype)
        assert torch.equal(native(x[2:3]), actual[2:3])


@pytest.mark.parametrize("options", [{"stride": 2}, {"stride": 3, "padding": 1}, {"stride": 3, "groups": 2}])
def test_a_convolution_of_another_kind_stays(options: dict[str, Any]):
    tower = nn.Sequential(nn.Conv2d(4, 4, 3, **options))
    assert optimise_patches(tower, best_kernels) == 0
    assert not isinstance(tower[0], NativePatches)
