"""Tiny random hybrid models of media: some of their language layers keep a state instead of KV."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

from cluster.media.torchvision_compat import ensure_torchvision
from cluster.types.media import MediaGeometry
from tests.flow.tiny_models import (
    AE,
    AS,
    AUD,
    AUDIO,
    HEAD_16,
    IMAGE,
    IMG,
    TEXT,
    TWO_EXPERTS,
    VE,
    VID,
    VIDEO,
    VS,
    TinyCase,
    TinyRequest,
    collect,
    noise,
    randomized,
)
from tests.flow.tiny_packed_models import (
    MROPE_INTERLEAVED,
    QWEN_VISION,
    VISION_IDS,
    add_image,
    add_video,
    qwen_vl_case,
)
from tests.flow.tiny_tiled_models import image_requests

_PLAIN_VISION: dict[str, Any] = {**QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 64}
_GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip


def qwen3_5() -> TinyCase:
    text = {**HEAD_16, **_GATED_DELTA, "rope_parameters": MROPE_INTERLEAVED}
    return qwen_vl_case(
        "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", _PLAIN_VISION, text, seconds=None, is_timed=True
    )


def qwen3_5_moe() -> TinyCase:
    text = {
        **HEAD_16, **_GATED_DELTA, **TWO_EXPERTS, "rope_parameters": MROPE_INTERLEAVED, "num_experts": 4,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }  # fmt: skip
    return qwen_vl_case(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", _PLAIN_VISION, text, seconds=None,
        is_timed=True,
    )  # fmt: skip


def lfm3_vl() -> TinyCase:
    vision = {
        **{key: value for key, value in QWEN_VISION.items() if key not in ("depth", "num_heads")},
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"] * 2,
    }  # fmt: skip
    text = {
        **TEXT, **HEAD_16, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
        "model_type": "lfm3",
    }  # fmt: skip
    config = hf.Lfm3VlConfig(
        vision_config=vision, text_config=text, projector_hidden_size=48, tie_word_embeddings=False,
        **VISION_IDS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.Lfm3VlForConditionalGeneration(config))
    first = add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2)
    collect(add_video(first, (2, 4, 4), None, (VE, 7, 8, VS)).text(3, 3))
    second = add_image(add_image(TinyRequest().text(3, 5), (1, 6, 4)).text(1, 6), (1, 4, 4)).text(4, 7)
    return TinyCase(model, [first, collect(second), TinyRequest().text(9, 8)])


def lfm2_vl() -> TinyCase:
    """Tiles of one size and a smaller one, then an image in one piece."""
    vision = {
        "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_patches": 16, "patch_size": 4,
        "vision_use_head": False,
    }  # fmt: skip
    text = {
        **TEXT,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "model_type": "lfm2",
    }
    config = hf.Lfm2VlConfig(
        vision_config=vision, text_config=text, image_token_id=IMG, projector_hidden_size=48,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [(_patches([(4, 4), (4, 4), (2, 4)]), 10), (_patches([(4, 2)]), 2)]
    return TinyCase(randomized(hf.Lfm2VlForConditionalGeneration(config)), image_requests(items))


def _patches(sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Of tiles of so many patches, padded to 16."""
    mask = torch.tensor([[i < height * width for i in range(16)] for height, width in sizes])
    patches = torch.randn(len(sizes), 16, 3 * 4 * 4, generator=torch.Generator().manual_seed(len(sizes)))
    return {
        "pixel_values": patches * mask[..., None], "spatial_shapes": torch.tensor(sizes),
        "pixel_attention_mask": mask.int(),
    }  # fmt: skip


def nemotron_h_omni() -> TinyCase:
    """All kinds of layers, and the norm of checkpoints with MTP layers. Clips have the image's token, so
    transformers takes images or clips in a prompt."""
    text = {
        **TEXT, **HEAD_16, **TWO_EXPERTS, "model_type": "nemotron_h", "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2.0,
        "patch_size": 4, "max_img_size": 64, "num_cls_tokens": 2, "num_registers": 1,
        "video_temporal_patch_size": 2, "initializer_range": 0.15,
    }  # fmt: skip
    audio = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "num_mel_bins": 16, "subsampling_conv_channels": 8, "projection_hidden_size": 48,
        "projection_bias": False, "initializer_range": 0.15,
    }  # fmt: skip
    ensure_torchvision()  # its configuration imports it
    config = hf.NemotronH_Omni_Reasoning_V3_Config(
        vision_config=vision, text_config=text, audio_config=audio, vision_hidden_size=32,
        projector_hidden_size=48, image_token_id=IMG, audio_token_id=AUD,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.NemotronH_Omni_Reasoning_V3(config))
    seen = TinyRequest().text(4, 1)
    for height, width in ((4, 6), (6, 2)):
        grid = torch.tensor([[height, width]])
        image = {"pixel_values": noise(height * width, 48), "image_grid_hw": grid}
        seen.raw(VS).media(IMAGE, image, MediaGeometry(height * width // 4)).raw(VE).text(3, width)
    clip = {"pixel_values_videos": noise(1, 3, 6, 16, 8)}
    watched = TinyRequest().raw(VS).media(VIDEO, clip, MediaGeometry(6), 3, (VE, 7, VS)).raw(VE).text(5, 2)
    watched.token_ids = [IMG if token == VID else token for token in watched.token_ids]
    for request, num_frames in ((seen, 41), (watched, 90)):
        mask = torch.arange(num_frames)[None] < num_frames - 1
        sound = {"input_features": noise(1, num_frames, 16), "input_features_mask": mask}
        request.raw(AS).media(AUDIO, sound, MediaGeometry(-(-num_frames // 8))).raw(AE).text(3, 4)
    return TinyCase(model, [collect(seen), collect(watched), TinyRequest().text(9, 8)])
