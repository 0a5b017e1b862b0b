"""Tiny random models of every served multimodal family, with prompts whose media fit them. `MEDIA_FAMILIES`
maps a readable name to a builder of `TinyCase`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import transformers as hf
from torch import Tensor

from cluster.types.media import MediaGeometry
from tests.flow.tiny_models import (
    AE,
    AS,
    AUD,
    AUDIO,
    GEMMA,
    HEAD_16,
    IMAGE,
    IMG,
    MIXED_LAYERS,
    TWO_EXPERTS,
    VE,
    VID,
    VIDEO,
    VS,
    TinyCase,
    TinyRequest,
    noise,
    randomized,
)

_TEXT = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15, "eos_token_id": None,
    "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MROPE_INTERLEAVED = {**_MROPE, "mrope_interleaved": True}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "initializer_range": 0.15,
}  # fmt: skip
_WINDOWED_VISION = {**_QWEN_VISION, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
_DEEPSTACK_VISION = {
    **_QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]
}  # fmt: skip
_VISION_IDS = {
    "image_token_id": IMG,
    "video_token_id": VID,
    "vision_start_token_id": VS,
    "vision_end_token_id": VE,
}
_PATCH_WIDTH = 3 * 2 * 4 * 4
_CLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN_AUDIO = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
    "max_source_positions": 1500, "initializer_range": 0.15,
}  # fmt: skip
_WHISPER = {
    "num_mel_bins": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "hidden_size": 32,
    "max_source_positions": 1500,
}  # fmt: skip


def _add_image(request: TinyRequest, grid: tuple[int, int, int]) -> TinyRequest:
    t, h, w = grid
    pixels = noise(t * h * w, _PATCH_WIDTH)
    item = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
    return request.raw(VS).media(IMAGE, item, MediaGeometry(t * h * w // 4, grid_thw=grid)).raw(VE)


def _add_video(
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


def _collect(request: TinyRequest) -> TinyRequest:
    """The processor's joint tensors of a whole prompt, from its single items."""
    keys = {key for _, item in request.items for key in item}
    joint = {key: torch.cat([item[key] for _, item in request.items if key in item]) for key in sorted(keys)}
    return request.given(**joint)


def _token_types(request: TinyRequest) -> TinyRequest:
    kinds = {IMG: 1, VID: 2}
    return request.given(
        mm_token_type_ids=torch.tensor([[kinds.get(token, 0) for token in request.token_ids]])
    )


def _qwen_vl_case(
    model_class: str, config_class: str, vision: dict, text: dict, *, seconds: float | None
) -> TinyCase:
    config = getattr(hf, config_class)(text_config={**_TEXT, **text}, vision_config=vision, **_VISION_IDS)
    torch.manual_seed(0)
    model = getattr(hf, model_class)(config)
    first = _add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2)
    timestamp = (VE, 7, 8, VS) if "deepstack_visual_indexes" in vision else ()
    _collect(_add_video(first, (2, 4, 4), seconds, timestamp).text(3, 3))
    second = _collect(
        _add_image(_add_image(TinyRequest().text(3, 5), (1, 6, 4)).text(1, 6), (1, 4, 4)).text(4, 7)
    )
    if seconds is not None:
        first.given(second_per_grid_ts=torch.tensor([seconds]))
    requests = [first, second, TinyRequest().text(9, 8)]
    return TinyCase(randomized(model), [_token_types(request) for request in requests])


def qwen2_vl() -> TinyCase:
    vision = {
        key: _QWEN_VISION[key]
        for key in ("depth", "num_heads", "patch_size", "temporal_patch_size", "in_channels")
    }
    vision |= {"spatial_merge_size": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    text = {"rope_parameters": _MROPE}
    return _qwen_vl_case("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", vision, text, seconds=None)


def qwen2_5_vl() -> TinyCase:
    text = {"rope_parameters": _MROPE}
    return _qwen_vl_case(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", _WINDOWED_VISION, text, seconds=1.5
    )


def qwen3_vl() -> TinyCase:
    text = {**HEAD_16, "rope_parameters": _MROPE_INTERLEAVED}
    return _qwen_vl_case(
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _DEEPSTACK_VISION, text, seconds=None
    )


def qwen3_vl_moe() -> TinyCase:
    text = {
        **HEAD_16,
        **TWO_EXPERTS,
        "rope_parameters": _MROPE_INTERLEAVED,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    }
    return _qwen_vl_case(
        "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", _DEEPSTACK_VISION, text, seconds=None
    )


def _add_mels(request: TinyRequest, num_frames: int, num_tokens: int) -> TinyRequest:
    mask = torch.ones(1, num_frames, dtype=torch.long)
    item = {"input_features": noise(1, 16, num_frames), "feature_attention_mask": mask}
    geometry = MediaGeometry(num_tokens, num_mel_frames=num_frames)
    return request.raw(AS).media(AUDIO, item, geometry).raw(AE)


def _omni_requests(audio_tokens: Callable[[int], int]) -> list[TinyRequest]:
    first = _add_video(_add_image(TinyRequest().text(4, 1), (1, 4, 6)).text(5, 2), (2, 4, 4), 2.0).text(3, 3)
    first = _collect(_add_mels(first, 90, audio_tokens(90)).text(4, 9))
    first.given(video_second_per_grid=torch.tensor([2.0]))
    second = _collect(_add_mels(TinyRequest().text(3, 4), 61, audio_tokens(61)).text(5, 5))
    return [first, second, TinyRequest().text(9, 8)]


def qwen2_5_omni() -> TinyCase:
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config=_WINDOWED_VISION,
        audio_config={**_QWEN_AUDIO, "n_window": 20, "output_dim": 64},
        image_token_index=IMG, video_token_index=VID, audio_token_index=AUD,
        audio_start_token_id=AS, audio_end_token_id=AE, vision_start_token_id=VS, vision_end_token_id=VE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen2_5OmniThinkerForConditionalGeneration(config)
    return TinyCase(randomized(model), _omni_requests(lambda frames: ((frames - 1) // 2 + 1 - 2) // 2 + 1))


def qwen3_omni() -> TinyCase:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    text = {**_TEXT, **HEAD_16, **TWO_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}
    audio = {
        **_QWEN_AUDIO, "n_window": 50, "n_window_infer": 100, "output_dim": 64, "downsample_hidden_size": 16,
        "conv_chunksize": 50,
    }  # fmt: skip
    config = hf.Qwen3OmniMoeThinkerConfig(
        text_config={**text, "rope_parameters": _MROPE_INTERLEAVED}, vision_config=_DEEPSTACK_VISION, audio_config=audio,
        audio_token_id=AUD, audio_start_token_id=AS, audio_end_token_id=AE, **_VISION_IDS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return TinyCase(
        randomized(model),
        _omni_requests(lambda frames: int(_get_feat_extract_output_lengths(torch.tensor(frames)))),
    )


def _image_requests(
    items: list[tuple[Mapping[str, Tensor], int]], start: int | None = None, parts: int = 1
) -> list[TinyRequest]:
    """First prompt: all items with text around them; second: the last item alone; third: text. `parts`:
    ranges of an item."""
    first = TinyRequest().text(9, 1)
    for seed, (item, num_tokens) in enumerate(items):
        first = _framed(first, item, num_tokens, start, parts).text(4, 10 + seed)
    second = _framed(TinyRequest().text(3, 2), *items[-1], start, parts).text(6, 3)
    return [_collect(first), _collect(second), TinyRequest().text(9, 8)]


def _framed(
    request: TinyRequest, item: Mapping[str, Tensor], num_tokens: int, start: int | None, parts: int
) -> TinyRequest:
    if start is None:
        return request.media(IMAGE, item, MediaGeometry(num_tokens), parts, (7, 8))
    return request.raw(start).media(IMAGE, item, MediaGeometry(num_tokens), parts, (VE, 7, start)).raw(VE)


def _pixels(count: int, seed: int, height: int = 16, width: int = 16) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def llava() -> TinyCase:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_CLIP, projection_dim=32), text_config=hf.LlamaConfig(**_TEXT),
        image_token_index=IMG, image_token_id=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.LlavaForConditionalGeneration(config)), _image_requests(items))


def _anyres_items(
    model: hf.PreTrainedModel, sizes: list[tuple[int, int]]
) -> list[tuple[dict[str, Tensor], int]]:
    items = []
    for seed, size in enumerate(sizes):
        item = {"pixel_values": _pixels(3, seed)[None], "image_sizes": torch.tensor([size])}
        with torch.no_grad():
            rows = model.model.get_image_features(**item, return_dict=True).pooler_output
        items.append((item, len(rows[0])))
    return items


_PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]


def llava_next() -> TinyCase:
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**_CLIP, projection_dim=32), text_config=hf.LlamaConfig(**_TEXT),
        image_token_index=IMG, image_token_id=IMG, image_grid_pinpoints=_PINPOINTS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaNextForConditionalGeneration(config))
    return TinyCase(model, _image_requests(_anyres_items(model, [(16, 30), (30, 16)])))


def llava_onevision() -> TinyCase:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**_CLIP), text_config=hf.Qwen2Config(**_TEXT), image_token_index=IMG,
        image_token_id=IMG, video_token_index=VID, video_token_id=VID, image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaOnevisionForConditionalGeneration(config))
    requests = _image_requests(_anyres_items(model, [(16, 30)]))
    clip = {"pixel_values_videos": noise(1, 2, 3, 16, 16)}
    requests.append(
        _collect(TinyRequest().text(3, 4).media(VIDEO, clip, MediaGeometry(2 * 4 + 1)).text(4, 5))
    )
    return TinyCase(model, requests)


def internvl() -> TinyCase:
    vision = hf.InternVLVisionConfig(**{**_CLIP, "image_size": [16, 16], "patch_size": [4, 4]})
    config = hf.InternVLConfig(
        vision_config=vision, text_config=hf.Qwen2Config(**_TEXT), image_token_id=IMG, downsample_ratio=0.5
    )
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(randomized(hf.InternVLForConditionalGeneration(config)), _image_requests(items))


def gemma3() -> TinyCase:
    text = hf.Gemma3TextConfig(**{**_TEXT, **GEMMA, **MIXED_LAYERS, "sliding_window": 12})
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**_CLIP, vision_use_head=False), text_config=text, image_token_index=IMG,
        image_token_id=IMG, boi_token_index=VS, eoi_token_index=VE, mm_tokens_per_image=16, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(2, seed)}, 32) for seed in (1, 2)]  # an image and a crop of it
    requests = _image_requests(items, start=VS, parts=2)
    for request in requests:
        request.given(token_type_ids=torch.tensor([[int(token == IMG) for token in request.token_ids]]))
    return TinyCase(randomized(hf.Gemma3ForConditionalGeneration(config)), requests)


def mistral3() -> TinyCase:
    vision = {**_CLIP, "num_hidden_layers": 2, "image_size": 32}
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**vision), text_config=hf.MistralConfig(**_TEXT, sliding_window=None),
        image_token_index=IMG, image_token_id=IMG, spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [
        ({"pixel_values": _pixels(1, s, 16, 32), "image_sizes": torch.tensor([[16, 32]])}, 8) for s in (1, 2)
    ]
    return TinyCase(randomized(hf.Mistral3ForConditionalGeneration(config)), _image_requests(items, parts=2))


def _tile_case(model_class: str, config_class: str) -> TinyCase:
    vision = {**_CLIP, "num_hidden_layers": 2}
    config = getattr(hf, config_class)(
        vision_config=vision, text_config=hf.LlamaConfig(**_TEXT), image_token_id=IMG, scale_factor=2
    )
    torch.manual_seed(0)
    model = getattr(hf, model_class)(config)
    items = [({"pixel_values": _pixels(2, 3)[None]}, 8)]
    return TinyCase(randomized(model), _image_requests(items, parts=2))


def idefics3() -> TinyCase:
    return _tile_case("Idefics3ForConditionalGeneration", "Idefics3Config")


def smolvlm() -> TinyCase:
    return _tile_case("SmolVLMForConditionalGeneration", "SmolVLMConfig")


def _audio_requests(
    clips: list[tuple[Mapping[str, Tensor], int]], *, frame: bool = False
) -> list[TinyRequest]:
    requests = [TinyRequest().text(9, 8)]
    for seed, (item, num_tokens) in enumerate(clips):
        request = TinyRequest().text(3 + seed, seed + 1)
        request = request.raw(AS) if frame else request
        request = request.media(AUDIO, item, MediaGeometry(num_tokens))
        request = request.raw(AE) if frame else request
        requests.append(_collect(request.text(6, seed + 20)))
    return requests


def _padded_mels(mask_key: str, num_frames: int) -> dict[str, Tensor]:
    mask = (torch.arange(3000) < num_frames).long()[None]
    generator = torch.Generator().manual_seed(num_frames)
    return {"input_features": torch.randn(1, 16, 3000, generator=generator), mask_key: mask}


def qwen2_audio() -> TinyCase:
    config = hf.Qwen2AudioConfig(
        audio_config=_QWEN_AUDIO,
        text_config=hf.Qwen2Config(**_TEXT),
        audio_token_index=AUD,
        audio_token_id=AUD,
    )
    torch.manual_seed(0)
    clips = [(_padded_mels("feature_attention_mask", frames), frames // 4) for frames in (120, 60)]
    model = randomized(hf.Qwen2AudioForConditionalGeneration(config))
    return TinyCase(model, _audio_requests(clips, frame=True))


def voxtral() -> TinyCase:
    config = hf.VoxtralConfig(audio_config=_WHISPER, text_config=hf.LlamaConfig(**_TEXT), audio_token_id=AUD)
    torch.manual_seed(0)
    clips = [({"input_features": noise(1, 16, 3000)}, 375)]
    return TinyCase(randomized(hf.VoxtralForConditionalGeneration(config)), _audio_requests(clips))


def audioflamingo3() -> TinyCase:
    config = hf.AudioFlamingo3Config(
        audio_config=_WHISPER, text_config=hf.Qwen2Config(**_TEXT), audio_token_id=AUD
    )
    torch.manual_seed(0)
    clips = [(_padded_mels("input_features_mask", frames), frames // 4) for frames in (400, 120)]
    return TinyCase(randomized(hf.AudioFlamingo3ForConditionalGeneration(config)), _audio_requests(clips))


def glmasr() -> TinyCase:
    audio = {**_WHISPER, "num_key_value_heads": 2, "max_position_embeddings": 1500}
    config = hf.GlmAsrConfig(audio_config=audio, text_config=hf.LlamaConfig(**_TEXT), audio_token_id=AUD)
    torch.manual_seed(0)
    clips = [(_padded_mels("input_features_mask", frames), frames // 8) for frames in (400, 120)]
    return TinyCase(randomized(hf.GlmAsrForConditionalGeneration(config)), _audio_requests(clips))


_BUILDERS = (
    qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen2_5_omni, qwen3_omni, llava, llava_next, llava_onevision, internvl,
    gemma3, mistral3, idefics3, smolvlm, qwen2_audio, voxtral, audioflamingo3, glmasr,
)  # fmt: skip
MEDIA_FAMILIES: dict[str, Callable[[], TinyCase]] = {builder.__name__: builder for builder in _BUILDERS}
