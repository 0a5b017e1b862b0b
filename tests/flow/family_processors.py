"""The processors of every served multimodal family, at the sizes of its tiny model. `PROCESSORS` maps the
names of `tiny_media_models` to functions of the tokenizer; `CALL_KWARGS` is what goes into
mm_processor_kwargs.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.flow import sound_processors as sound

IMAGE, VIDEO = "<|IMAGE|>", "<|VIDEO|>"

_QWEN_PATCHES: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_AREA = {"shortest_edge": 256, "longest_edge": 2048}


def _qwen_vision(video_class: str = "Qwen2VLVideoProcessor", frames: int = 1) -> dict[str, Any]:
    area = {key: value * frames for key, value in _AREA.items()}
    return {
        "image_processor": hf.Qwen2VLImageProcessor(size=_AREA, **_QWEN_PATCHES),
        "video_processor": getattr(hf, video_class)(
            size=area, min_frames=4, max_frames=8, cap_pixels_per_frame=False, **_QWEN_PATCHES
        ),
    }


def _qwen2_vl(tokenizer: Any) -> Any:
    return hf.Qwen2VLProcessor(tokenizer=tokenizer, **_qwen_vision())


def _qwen2_5_vl(tokenizer: Any) -> Any:
    return hf.Qwen2_5_VLProcessor(tokenizer=tokenizer, **_qwen_vision())


def _qwen3_vl(tokenizer: Any) -> Any:
    return hf.Qwen3VLProcessor(tokenizer=tokenizer, **_qwen_vision("Qwen3VLVideoProcessor", frames=8))


def _lfm3_vl(tokenizer: Any) -> Any:
    return hf.Lfm3VlProcessor(tokenizer=tokenizer, **_qwen_vision("Qwen3VLVideoProcessor", frames=8))


def _nemotron_h_omni(tokenizer: Any) -> Any:
    images = hf.NemotronH_Omni_Reasoning_V3ImageProcessor(
        patch_size=4, min_num_patches=16, max_num_patches=64, max_model_len=64
    )
    clips = hf.NemotronH_Omni_Reasoning_V3VideoProcessor(
        patch_size=4, video_target_num_patches=24, norm_mean=hf.image_utils.OPENAI_CLIP_MEAN,
        norm_std=hf.image_utils.OPENAI_CLIP_STD, num_frames=5,
    )  # fmt: skip
    ears = hf.ParakeetFeatureExtractor(feature_size=16)
    return hf.NemotronH_Omni_Reasoning_V3Processor(images, clips, tokenizer, ears)


def _qwen2_5_omni(tokenizer: Any) -> Any:
    return hf.Qwen2_5OmniProcessor(tokenizer=tokenizer, feature_extractor=sound.ears(), **_qwen_vision())


def _qwen3_omni(tokenizer: Any) -> Any:
    return hf.Qwen3OmniMoeProcessor(tokenizer=tokenizer, feature_extractor=sound.ears(), **_qwen_vision())


def _glm(prefix: str, tokenizer: Any, processor: str = "") -> Any:
    area = {key: 2 * value for key, value in _AREA.items()}  # it counts the two frames of a temporal patch
    clips = {key: 8 * value for key, value in _AREA.items()}
    images = getattr(hf, f"{prefix}ImageProcessor")(size=area, **_QWEN_PATCHES)
    videos = getattr(hf, f"{prefix}VideoProcessor")(size=clips, num_frames=8, **_QWEN_PATCHES)
    return getattr(hf, processor or f"{prefix}Processor")(images, tokenizer, videos)


def _glm4v(tokenizer: Any) -> Any:
    return _glm("Glm4v", tokenizer)


def _glm46v(tokenizer: Any) -> Any:
    return _glm("Glm46V", tokenizer)


def _glmga(tokenizer: Any) -> Any:
    return _glm("Glmga", tokenizer, "Glm46VProcessor")


def _cosmos3_edge(tokenizer: Any) -> Any:
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
    images = hf.Cosmos3EdgeImageProcessor(size=_AREA, **sizes)
    area = {key: 8 * value for key, value in _AREA.items()}
    return hf.Cosmos3EdgeProcessor(images, tokenizer, hf.Cosmos3EdgeVideoProcessor(size=area, **sizes))


def _cohere_compass(tokenizer: Any) -> Any:
    images = hf.CohereCompassImageProcessor(size=_AREA, **_QWEN_PATCHES)
    area = {key: 8 * value for key, value in _AREA.items()}
    clips = hf.CohereCompassVideoProcessor(size=area, min_frames=4, max_frames=8, **_QWEN_PATCHES)
    return hf.CohereCompassProcessor(images, tokenizer, clips)


def _hunyuan_vl(tokenizer: Any) -> Any:
    images = hf.HunYuanVLImageProcessor(size=_AREA, patch_size=4, merge_size=2)
    return hf.HunYuanVLProcessor(images, tokenizer)


def _kimi_k25(tokenizer: Any) -> Any:
    sizes: dict[str, Any] = {"patch_size": 4, "max_patches": 64, "size": {"max_height": 16, "max_width": 16}}
    videos = hf.Kimi_K25VideoProcessor(**sizes)
    return hf.Kimi_K25Processor(hf.Kimi_K25ImageProcessor(**sizes), tokenizer, videos)


def _hyperclovax_vision_v2(tokenizer: Any) -> Any:
    return hf.HyperCLOVAXVisionV2Processor(tokenizer=tokenizer, **_qwen_vision())


def _muse(name: str, tokenizer: Any, **parts: Any) -> Any:
    sizes: dict[str, Any] = {"patch_size": 4, "max_image_tokens": 24}
    images = hf.MuseGlimmerImageProcessor(**sizes)
    videos = hf.MuseGlimmerVideoProcessor(patch_size=4, max_video_frame_tokens=6, num_frames=6)
    return getattr(hf, f"{name}Processor")(images, videos, tokenizer, **parts)


def _muse_glimmer(tokenizer: Any) -> Any:
    return _muse("MuseGlimmer", tokenizer)


def _muse_spark(tokenizer: Any) -> Any:
    return _muse("MuseSpark", tokenizer, feature_extractor=hf.MuseSparkFeatureExtractor(samples_per_token=4))


def _exaone4_5(tokenizer: Any) -> Any:
    return hf.Exaone4_5_Processor(tokenizer=tokenizer, **_qwen_vision())


def _paddleocr_vl(tokenizer: Any) -> Any:
    images = hf.PaddleOCRVLImageProcessor(size=_AREA, patch_size=4, merge_size=2)
    return hf.PaddleOCRVLProcessor(images, tokenizer)


_SQUARE = {"height": 16, "width": 16}
_PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]
_LLAVA_STRATEGY: dict[str, Any] = {
    "patch_size": 4,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def _llava(tokenizer: Any) -> Any:
    images = hf.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=_SQUARE)
    return hf.LlavaProcessor(images, tokenizer, **_LLAVA_STRATEGY)


def _llava_next(tokenizer: Any) -> Any:
    images = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size=_SQUARE, image_grid_pinpoints=_PINPOINTS
    )
    return hf.LlavaNextProcessor(images, tokenizer, **_LLAVA_STRATEGY)


def _llava_next_video(tokenizer: Any) -> Any:
    images = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size=_SQUARE, image_grid_pinpoints=_PINPOINTS
    )
    clips = hf.LlavaNextVideoVideoProcessor(size={"shortest_edge": 16}, crop_size=_SQUARE, num_frames=4)
    return hf.LlavaNextVideoProcessor(clips, images, tokenizer, **_LLAVA_STRATEGY)


def _llava_onevision(tokenizer: Any) -> Any:
    images = hf.LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=_PINPOINTS)
    clips = hf.LlavaOnevisionVideoProcessor(size=_SQUARE, num_frames=4)
    return hf.LlavaOnevisionProcessor(
        images, tokenizer, clips, num_image_tokens=16, vision_feature_select_strategy="full"
    )


def _internvl(tokenizer: Any) -> Any:
    images = hf.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    return hf.InternVLProcessor(
        images, tokenizer, hf.InternVLVideoProcessor(size=_SQUARE, num_frames=3), image_seq_length=4
    )


def _perception_lm(tokenizer: Any) -> Any:
    images = hf.PerceptionLMImageProcessor(tile_size=56, max_num_tiles=4)
    clips = hf.PerceptionLMVideoProcessor(size={"height": 56, "width": 56}, num_frames=3)
    return hf.PerceptionLMProcessor(clips, images, tokenizer, patch_size=14, pooling_ratio=2)


def _fast_vlm(tokenizer: Any) -> Any:
    side = {"height": 128, "width": 128}
    images = hf.CLIPImageProcessor(size={"shortest_edge": 128}, crop_size=side)
    return hf.LlavaProcessor(images, tokenizer, patch_size=64, vision_feature_select_strategy="full")


def _qianfan_ocr(tokenizer: Any) -> Any:
    images = hf.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    return hf.QianfanOCRProcessor(images, tokenizer, image_seq_length=4)


def _got_ocr2(tokenizer: Any) -> Any:
    return hf.GotOcr2Processor(hf.GotOcr2ImageProcessor(size={"height": 64, "width": 64}), tokenizer)


def _janus(tokenizer: Any) -> Any:
    images = hf.JanusImageProcessor(size=_SQUARE, min_size=8)
    return hf.JanusProcessor(images, tokenizer, num_image_tokens=16)


def _deepseek_vl_hybrid(tokenizer: Any) -> Any:
    images = hf.DeepseekVLHybridImageProcessor(
        size=_SQUARE, high_res_size={"height": 64, "width": 64}, min_size=8
    )
    return hf.DeepseekVLHybridProcessor(images, tokenizer, num_image_tokens=16)


def _deepseek_ocr2(tokenizer: Any) -> Any:
    images = hf.DeepseekOcr2ImageProcessor(size={"height": 128, "width": 128}, tile_size=96, max_patches=2)
    return hf.DeepseekOcr2Processor(images, tokenizer, patch_size=2)


def _step3p7(tokenizer: Any) -> Any:
    sizes: dict[str, Any] = {"patch_size": 16, "vision_patch_size": 4, "max_image_size": 64}
    images = hf.Step3p7ImageProcessor(size={"height": 32, "width": 32}, **sizes)
    return hf.Step3p7Processor(images, tokenizer)


def _granite_docling(tokenizer: Any) -> Any:
    return hf.GraniteDoclingProcessor(
        hf.GraniteDoclingImageProcessor(size=_SQUARE, max_patches=4), tokenizer, image_seq_len=4
    )


def _lfm2_vl(tokenizer: Any) -> Any:
    images = hf.Lfm2VlImageProcessor(
        tile_size=32, encoder_patch_size=4, min_image_tokens=1, max_image_tokens=16, max_tiles=4
    )
    return hf.Lfm2VlProcessor(images, tokenizer)


def _aya_vision(tokenizer: Any) -> Any:
    images = hf.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    return hf.AyaVisionProcessor(images, tokenizer, patch_size=4, img_size=16, downsample_factor=2)


def _llama4(tokenizer: Any) -> Any:
    images = hf.Llama4ImageProcessor(size=_SQUARE, max_patches=4)
    return hf.Llama4Processor(images, tokenizer, patch_size=4)


def _cohere2_vision(tokenizer: Any) -> Any:
    sizes: dict[str, Any] = {"max_patches": 4, "patch_size": 2}
    images = hf.Cohere2VisionImageProcessor(size=_SQUARE, **sizes)
    return hf.Cohere2VisionProcessor(images, tokenizer)


def _deepseek_vl(tokenizer: Any) -> Any:
    images = hf.DeepseekVLImageProcessor(size=_SQUARE, min_size=8)
    return hf.DeepseekVLProcessor(images, tokenizer, num_image_tokens=16)


def _lighton_ocr(tokenizer: Any) -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})
    return hf.LightOnOcrProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2)


def _aria(tokenizer: Any) -> Any:
    images = hf.AriaImageProcessor(min_image_size=98)
    return hf.AriaProcessor(images, tokenizer, size_conversion={490: 12})


def _mistral3(tokenizer: Any) -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
    return hf.PixtralProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2, image_token=IMAGE)


def _idefics3(tokenizer: Any) -> Any:
    images = hf.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return hf.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _smolvlm(tokenizer: Any) -> Any:
    from transformers.models.smolvlm import processing_smolvlm

    if processing_smolvlm.num2words is None:  # it spells the number of frames; not installed everywhere
        processing_smolvlm.num2words = str
    images = hf.SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    clips = hf.SmolVLMVideoProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, num_frames=4, fps=1
    )
    return hf.SmolVLMProcessor(images, tokenizer, clips, image_seq_len=4)


def _gemma3(tokenizer: Any) -> Any:
    return hf.Gemma3Processor(hf.Gemma3ImageProcessor(size=_SQUARE), tokenizer, image_seq_length=16)


_GEMMA4_PATCHES: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}


def _gemma4(tokenizer: Any) -> Any:
    images, clips = (
        hf.Gemma4ImageProcessor(**_GEMMA4_PATCHES),
        hf.Gemma4VideoProcessor(**_GEMMA4_PATCHES, num_frames=4),
    )
    return hf.Gemma4Processor(hf.Gemma4AudioFeatureExtractor(feature_size=16), images, tokenizer, clips)


CALL_KWARGS: dict[str, dict[str, Any]] = {  # what these processors ignore in their own saved configuration
    "qwen2_5_omni": {"videos_kwargs": {"size": _AREA}},
    "qwen3_omni": {"videos_kwargs": {"size": _AREA}},
    "voxtral": {
        "audio_kwargs": {
            "pad_to_multiple_of": sound.WINDOW_S * 16_000, "max_source_positions": sound.WINDOW_S * 100
        }
    },
    "cosmos3_edge": {"text_kwargs": {"return_mm_token_type_ids": True}},
    "aria": {"images_kwargs": {"max_image_size": 490, "split_image": True}},
    "got_ocr2": {"images_kwargs": {"num_image_tokens": 16}},
    "gemma3": {
        "images_kwargs": {
            "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }
    },
}  # fmt: skip
PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni": _qwen3_omni,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "glm46v": _glm46v,
    "glm_ocr": _glm46v,
    "glmga": _glmga,
    "exaone4_5": _exaone4_5,
    "cosmos3_omni": _qwen3_vl,
    "cosmos3_edge": _cosmos3_edge,
    "cohere_compass": _cohere_compass,
    "hunyuan_vl": _hunyuan_vl,
    "kimi_k25": _kimi_k25,
    "hyperclovax_vision_v2": _hyperclovax_vision_v2,
    "muse_glimmer": _muse_glimmer,
    "muse_spark": _muse_spark,
    "paddleocr_vl": _paddleocr_vl,
    "llava": _llava,
    "vipllava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next_video,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "perception_lm": _perception_lm,
    "fast_vlm": _fast_vlm,
    "qianfan_ocr": _qianfan_ocr,
    "got_ocr2": _got_ocr2,
    "janus": _janus,
    "deepseek_vl_hybrid": _deepseek_vl_hybrid,
    "deepseek_ocr2": _deepseek_ocr2,
    "step3p7": _step3p7,
    "granite_docling": _granite_docling,
    "lfm2_vl": _lfm2_vl,
    "lfm3_vl": _lfm3_vl,
    "nemotron_h_omni": _nemotron_h_omni,
    "aria": _aria,
    "mistral3": _mistral3,
    "llama4": _llama4,
    "lighton_ocr": _lighton_ocr,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "deepseek_vl": _deepseek_vl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_small": _gemma4,
    "qwen2_audio": sound.qwen2_audio,
    "qwen3_asr": sound.qwen3_asr,
    "audioflamingo3": sound.audioflamingo3,
    "musicflamingo": sound.musicflamingo,
    "glmasr": sound.glmasr,
    "moss_transcribe_diarize": sound.moss_transcribe_diarize,
    "omniasr": sound.omniasr,
}
