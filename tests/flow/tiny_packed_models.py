"""Tiny random models of the families that take packed patches of images and clips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf

from cluster.types.media import MediaGeometry
from tests.flow.tiny_audio_models import QWEN_AUDIO
from tests.flow.tiny_models import (
    AE,
    AS,
    AUD,
    AUDIO,
    DEEPSEEK,
    HEAD_16,
    IMAGE,
    IMG,
    MIXED_LAYERS,
    TEXT,
    TWO_EXPERTS,
    VE,
    VID,
    VIDEO,
    VS,
    YARN,
    TinyCase,
    TinyRequest,
    collect,
    noise,
    randomized,
)

_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MROPE_INTERLEAVED: dict[str, Any] = {**_MROPE, "mrope_interleaved": True}
QWEN_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "initializer_range": 0.15,
}  # fmt: skip
_WINDOWED_VISION: dict[str, Any] = {
    **QWEN_VISION,
    "out_hidden_size": 64,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_DEEPSTACK_VISION: dict[str, Any] = {
    **QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]
}  # fmt: skip
_VISION_MARKS: dict[str, Any] = {"vision_start_token_id": VS, "vision_end_token_id": VE}
VISION_IDS: dict[str, Any] = {
    "image_token_id": IMG,
    "video_token_id": VID,
    "vision_start_token_id": VS,
    "vision_end_token_id": VE,
}
_PATCH_WIDTH = 3 * 2 * 4 * 4


def add_image(request: TinyRequest, grid: tuple[int, int, int]) -> TinyRequest:
    t, h, w = grid
    pixels = noise(t * h * w, _PATCH_WIDTH)
    item = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
    return request.raw(VS).media(IMAGE, item, MediaGeometry(t * h * w // 4, grid_thw=grid)).raw(VE)


def add_video(
    request: TinyRequest,
    grid: tuple[int, int, int],
    second_per_grid: float | None,
    between: Sequence[int] = (),
) -> TinyRequest:
    """`between`: tokens that stand between its temporal patches."""
    t, h, w = grid
    item = {"pixel_values_videos": noise(t * h * w, _PATCH_WIDTH), "video_grid_thw": torch.tensor([grid])}
    geometry = MediaGeometry(t * h * w // 4, grid_thw=grid, second_per_grid=second_per_grid)
    return request.raw(VS).media(VIDEO, item, geometry, t if between else 1, between).raw(VE)


def _token_types(request: TinyRequest) -> TinyRequest:
    kinds = {IMG: 1, VID: 2}
    return request.given(
        mm_token_type_ids=torch.tensor([[kinds.get(token, 0) for token in request.token_ids]])
    )


def qwen_vl_case(
    model_class: str, config_class: str, vision: dict, text: dict, *, seconds: float | None,
    is_timed: bool = False,
) -> TinyCase:  # fmt: skip
    """is_timed: timestamps stand between a clip's frames."""
    config = getattr(hf, config_class)(text_config={**TEXT, **text}, vision_config=vision, **VISION_IDS)
    torch.manual_seed(0)
    model = getattr(hf, model_class)(config)
    first = add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2)
    timestamp = (VE, 7, 8, VS) if is_timed or "deepstack_visual_indexes" in vision else ()
    collect(add_video(first, (2, 4, 4), seconds, timestamp).text(3, 3))
    second = collect(
        add_image(add_image(TinyRequest().text(3, 5), (1, 6, 4)).text(1, 6), (1, 4, 4)).text(4, 7)
    )
    if seconds is not None:
        first.given(second_per_grid_ts=torch.tensor([seconds]))
    requests = [first, second, TinyRequest().text(9, 8)]
    return TinyCase(randomized(model), [_token_types(request) for request in requests])


def qwen2_vl() -> TinyCase:
    vision = {
        key: QWEN_VISION[key]
        for key in ("depth", "num_heads", "patch_size", "temporal_patch_size", "in_channels")
    }
    vision |= {"spatial_merge_size": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    text = {"rope_parameters": _MROPE}
    return qwen_vl_case("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", vision, text, seconds=None)


def qwen2_5_vl() -> TinyCase:
    text = {"rope_parameters": _MROPE}
    return qwen_vl_case(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", _WINDOWED_VISION, text, seconds=1.5
    )


def qwen3_vl() -> TinyCase:
    text = {**HEAD_16, "rope_parameters": MROPE_INTERLEAVED}
    return qwen_vl_case(
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _DEEPSTACK_VISION, text, seconds=None
    )


def qwen3_vl_moe() -> TinyCase:
    text = {
        **HEAD_16,
        **TWO_EXPERTS,
        "rope_parameters": MROPE_INTERLEAVED,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    }
    return qwen_vl_case(
        "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", _DEEPSTACK_VISION, text, seconds=None
    )


def cosmos3_omni() -> TinyCase:
    text = {**HEAD_16, "rope_parameters": MROPE_INTERLEAVED}
    return qwen_vl_case(
        "Cosmos3OmniForConditionalGeneration", "Cosmos3OmniConfig", _DEEPSTACK_VISION, text, seconds=None
    )


def _add_mels(request: TinyRequest, num_frames: int, num_tokens: int) -> TinyRequest:
    mask = torch.ones(1, num_frames, dtype=torch.long)
    item = {"input_features": noise(1, 16, num_frames), "feature_attention_mask": mask}
    geometry = MediaGeometry(num_tokens, num_mel_frames=num_frames)
    return request.raw(AS).media(AUDIO, item, geometry).raw(AE)


def _omni_requests(audio_tokens: Callable[[int], int]) -> list[TinyRequest]:
    first = add_video(add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2), (2, 4, 4), 2.0).text(3, 3)
    first = collect(_add_mels(first, 90, audio_tokens(90)).text(4, 9))
    first.given(video_second_per_grid=torch.tensor([2.0]))
    second = collect(_add_mels(TinyRequest().text(3, 4), 61, audio_tokens(61)).text(5, 5))
    return [first, second, TinyRequest().text(9, 8)]


def qwen2_5_omni() -> TinyCase:
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": _MROPE},
        vision_config=_WINDOWED_VISION,
        audio_config={**QWEN_AUDIO, "n_window": 20, "output_dim": 64},
        image_token_index=IMG, video_token_index=VID, audio_token_index=AUD,
        audio_start_token_id=AS, audio_end_token_id=AE, **_VISION_MARKS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen2_5OmniThinkerForConditionalGeneration(config)
    return TinyCase(randomized(model), _omni_requests(lambda frames: ((frames - 1) // 2 + 1 - 2) // 2 + 1))


def qwen3_omni() -> TinyCase:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    text = {**TEXT, **HEAD_16, **TWO_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}
    audio = {
        **QWEN_AUDIO, "n_window": 50, "n_window_infer": 100, "output_dim": 64, "downsample_hidden_size": 16,
        "conv_chunksize": 50,
    }  # fmt: skip
    config = hf.Qwen3OmniMoeThinkerConfig(
        text_config={**text, "rope_parameters": MROPE_INTERLEAVED}, vision_config=_DEEPSTACK_VISION,
        audio_config=audio,
        audio_token_id=AUD, audio_start_token_id=AS, **{**VISION_IDS, "audio_end_token_id": AE},
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return TinyCase(
        randomized(model),
        _omni_requests(lambda frames: int(_get_feat_extract_output_lengths(torch.tensor(frames)))),
    )


def _glm_case(name: str, text: dict, vision: dict | None = None, config_name: str = "") -> TinyCase:
    """The rows of a clip stand under the image's token."""
    config_class = getattr(hf, f"{config_name or name}Config")
    sizes = {**QWEN_VISION, "out_hidden_size": 64, "image_size": 16, **(vision or {})}
    config = config_class(
        text_config={**TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}, **text},
        vision_config=sizes, image_token_id=IMG, video_token_id=VID, image_start_token_id=VS,
        image_end_token_id=VE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(getattr(hf, f"{name}ForConditionalGeneration")(config))
    images = add_image(TinyRequest().text(3, 5), (1, 6, 4)).text(1, 6)
    images = collect(add_image(images, (1, 4, 4)).text(4, 7))
    clip = collect(add_video(TinyRequest().text(4, 1), (2, 4, 4), None, (VE, 7, 8, VS)).text(3, 3))
    requests = [_token_types(request) for request in (images, clip, TinyRequest().text(9, 8))]
    for request in requests:
        request.token_ids = [IMG if token == VID else token for token in request.token_ids]
    return TinyCase(model, requests)


def glm4v() -> TinyCase:
    return _glm_case("Glm4v", {})


def glm46v() -> TinyCase:
    return _glm_case("Glm46V", {})


def glmga() -> TinyCase:
    return _glm_case("Glm46V", {}, config_name="Glmga")


def glm4v_moe() -> TinyCase:
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
    return _glm_case("Glm4vMoe", {**TWO_EXPERTS, **experts, "first_k_dense_replace": 1})


def glm_ocr() -> TinyCase:
    return _glm_case("GlmOcr", HEAD_16)


def exaone4_5() -> TinyCase:
    text = hf.Exaone4Config(
        **{**TEXT, **HEAD_16, "sliding_window": 16, "layer_types": MIXED_LAYERS["layer_types"]}
    )
    vision = {**_WINDOWED_VISION, "num_key_value_heads": 1}
    config = hf.Exaone4_5_Config(
        text_config=text, vision_config=vision, image_token_id=IMG, video_token_id=VID
    )
    torch.manual_seed(0)
    first = add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2)
    collect(add_video(first, (2, 4, 4), None).text(3, 3))
    second = collect(add_image(TinyRequest().text(3, 5), (1, 6, 4)).text(4, 7))
    return TinyCase(
        randomized(hf.Exaone4_5_ForConditionalGeneration(config)), [first, second, TinyRequest().text(9, 8)]
    )


def _flat_case(model: hf.PreTrainedModel, *patch_shape: int, token_types: bool = False) -> TinyCase:
    """Images alone; patches of the given shape."""
    requests = [TinyRequest().text(9, 8)]
    for seed, (h, w) in enumerate([(4, 6), (6, 4)]):
        item = {"pixel_values": noise(h * w, *patch_shape), "image_grid_thw": torch.tensor([[1, h, w]])}
        request = TinyRequest().text(4 + seed, seed).raw(VS)
        request.media(IMAGE, item, MediaGeometry(h * w // 4, grid_thw=(1, h, w))).raw(VE).text(5, seed + 3)
        requests.append(collect(request))
    if token_types:
        requests = [_token_types(request) for request in requests]
    return TinyCase(randomized(model), requests)


_NAVIT: dict[str, Any] = {
    "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def kimi_k25() -> TinyCase:
    config = hf.Kimi_K25Config(
        text_config=hf.DeepseekV3Config(**{**TEXT, **DEEPSEEK, "rope_parameters": YARN}),
        vision_config=_NAVIT, projection_hidden_size=32, image_token_id=IMG, video_token_id=VID,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return _flat_case(hf.Kimi_K25ForConditionalGeneration(config), 3, 4, 4)


def hyperclovax_vision_v2() -> TinyCase:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.25}
    config = hf.HyperCLOVAXVisionV2Config(
        text_config=hf.HyperCLOVAXConfig(**{**TEXT, **scales}), vision_config=_WINDOWED_VISION,
        image_token_id=IMG, video_token_id=VID, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return _flat_case(hf.HyperCLOVAXVisionV2ForConditionalGeneration(config), _PATCH_WIDTH)


def _muse_case(name: str, text: dict, **parts: object) -> TinyCase:
    """Every fourth layer, counted from the last, has no window and no rotary positions."""
    config = getattr(hf, f"{name}Config")(
        text_config={**TEXT, **HEAD_16, "sliding_window": 12, "num_hidden_layers": 4, **text},
        vision_config={**_NAVIT, "pos_emb_height": 4, "pos_emb_width": 4}, out_hidden_size=4 * 32,
        projector_hidden_size=64,
        image_token_id=IMG, video_token_id=VID, **parts,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForConditionalGeneration")(config)
    first = add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2)
    collect(add_video(first, (2, 4, 4), None, (VE, 7, 8, VS)).text(3, 3))
    second = collect(add_image(TinyRequest().text(3, 5), (1, 6, 4)).text(4, 7))
    return TinyCase(randomized(model), [first, second, TinyRequest().text(9, 8)])


def muse_glimmer() -> TinyCase:
    return _muse_case("MuseGlimmer", {})


def muse_spark() -> TinyCase:
    experts = {**TWO_EXPERTS, "num_local_experts": 4, "moe_intermediate_size": 32, "moe_hidden_size": 32}
    ears = {
        "patch_sizes": [2, 2], "hidden_sizes": [8, 8], "depths": [1, 1], "num_hidden_layers": 2,
        "out_hidden_size": 64,
    }  # fmt: skip
    return _muse_case("MuseSpark", experts, audio_config=ears, audio_token_id=AUD)


def cohere_compass() -> TinyCase:
    """Windows with rotary positions, full attention without."""
    ropes = {"sliding_attention": {**_MROPE, "rope_type": "default"}, "full_attention": None}
    text = {**MIXED_LAYERS, "sliding_window": 12, "rope_parameters": ropes, "logit_scale": 0.25}
    return qwen_vl_case(
        "CohereCompassForConditionalGeneration", "CohereCompassConfig", _DEEPSTACK_VISION, text, seconds=None
    )


def hunyuan_vl() -> TinyCase:
    rope = {
        "type": "xdrope", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "xdrope_section": [2, 2, 2, 2],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "patch_size": 4, "out_hidden_size": 64, "max_image_size": 64,
    }  # fmt: skip
    config = hf.HunYuanVLConfig(
        text_config={**TEXT, **HEAD_16, "rope_parameters": rope}, vision_config=vision, image_token_id=IMG,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    first, second = TinyRequest().text(4, 1), TinyRequest().text(3, 5)
    for request, (h, w) in ((first, (4, 6)), (first, (6, 4)), (second, (4, 4))):
        item = {"pixel_values": noise(h * w, 3 * 4 * 4), "image_grid_thw": torch.tensor([[1, h, w]])}
        rows = h // 2 * (w // 2 + 1) + 2  # with row ends and two markers
        request.raw(VS).media(IMAGE, item, MediaGeometry(rows, grid_thw=(1, h, w))).raw(VE).text(5, h)
    requests = [_token_types(collect(request)) for request in (first, second)]
    model = randomized(hf.HunYuanVLForConditionalGeneration(config))
    return TinyCase(model, [*requests, TinyRequest().text(9, 8)])


def cosmos3_edge() -> TinyCase:
    text = {**HEAD_16, "rope_parameters": _MROPE}
    config = hf.Cosmos3EdgeConfig(
        text_config={**TEXT, **text}, projector_hidden_size=64, **VISION_IDS,
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "num_patches": 16,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    return _flat_case(hf.Cosmos3EdgeForConditionalGeneration(config), 3 * 4 * 4, token_types=True)


def paddleocr_vl() -> TinyCase:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16, "spatial_merge_size": 2,
    }  # fmt: skip
    config = hf.PaddleOCRVLConfig(
        text_config={**TEXT, **HEAD_16, "rope_parameters": _MROPE}, vision_config=vision, image_token_id=IMG,
        video_token_id=VID, vision_start_token_id=VS, vision_end_token_id=VE,
    )  # fmt: skip
    torch.manual_seed(0)
    return _flat_case(hf.PaddleOCRVLForConditionalGeneration(config), 3, 4, 4, token_types=True)
