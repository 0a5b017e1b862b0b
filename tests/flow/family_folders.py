"""Model folders of every served multimodal family, as a client's operator would have them: a tiny random
model, the shipped demo model's tokenizer with the family's special tokens, the family's own processor, a chat
template. `FAMILIES` names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf

from cluster.media.torchvision_compat import ensure_torchvision
from cluster.types.media import Modality
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import randomized
from tests.flow.voxtral_folder import VoxtralReference, write_preprocessor, write_tekken

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
IMAGE, VIDEO, AUDIO = "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"
VISION_START, VISION_END, SOUND_START, SOUND_END = (
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
)
SPECIAL_TOKENS = {
    "image_token": IMAGE, "video_token": VIDEO, "audio_token": AUDIO, "vision_bos_token": VISION_START,
    "vision_eos_token": VISION_END, "audio_bos_token": SOUND_START, "audio_eos_token": SOUND_END,
    "vision_start_token": VISION_START, "vision_end_token": VISION_END, "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>", "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": IMAGE,
    "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "img_line_break_token": "[IMG_BREAK]",
}  # fmt: skip
OWN_TOKENS = {  # that templates and processors of transformers write themselves
    "idefics3": {"image_token": "<image>"},
    "smolvlm": {"image_token": "<image>", "video_token": "<video>"},
    "aya_vision": {"image_token": "<|IMG_PATCH|>"},
    "voxtral": {
        "audio_token": "[AUDIO]", "audio_bos_token": "[BEGIN_AUDIO]", "eos_token": "</s>",
        "instruction_token": "[INST]",
        "answer_token": "[/INST]", "call_token": "[TOOL_CALLS]",
    },
}  # fmt: skip
OTHER_TOKENS = [
    "[IMG_BREAK]", "[IMG_END]", "<end_of_utterance>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>",
    "TILE_GLOBAL",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip
GLM_CLIP = ("<|begin_of_video|>", "<|end_of_video|>")  # by which its processor finds clips in the prompt
VOCAB_SIZE = 1088
SOUND_WINDOW_S = 2
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}@image@{% elif part.type == 'video' %}@video@{% elif part.type == 'audio' %}@audio@\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class FamilyFolder:
    path: Path
    model: hf.PreTrainedModel
    processor: Any
    call_kwargs: dict[str, Any]


def save_family(name: str, path: Path) -> FamilyFolder:
    """Writes the folder. Blocks for a moment."""
    ensure_torchvision()
    processor = _voxtral(path) if name == "voxtral" else _processor(name, path)
    model = _model(name, processor.tokenizer)
    model.save_pretrained(path)
    call_kwargs = CALL_KWARGS.get(name, {})
    (path / "mm_processor_kwargs.json").write_text(json.dumps(call_kwargs))
    return FamilyFolder(path, model, processor, call_kwargs)


def _processor(name: str, path: Path) -> Any:
    """As it is read from the folder, where it is saved."""
    special_tokens = SPECIAL_TOKENS | OWN_TOKENS.get(name, {})
    tokenizer = hf.AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=special_tokens)
    tokenizer.add_tokens(OTHER_TOKENS, special_tokens=True)
    processor = PROCESSORS[name](tokenizer)
    processor.chat_template = _template(name, processor)
    processor.save_pretrained(path)
    return hf.AutoProcessor.from_pretrained(path)


def _voxtral(path: Path) -> VoxtralReference:
    write_tekken(path, VOCAB_SIZE)
    write_preprocessor(path, _ears())
    MEDIA_FAMILIES["voxtral"]().model.config.save_pretrained(path)
    return VoxtralReference(path)


def _template(name: str, processor: Any) -> str:
    frames = {
        Modality.IMAGE: (VISION_START, VISION_END),
        Modality.VIDEO: GLM_CLIP if name.startswith("glm") else (VISION_START, VISION_END),
        Modality.AUDIO: (SOUND_START, SOUND_END),
    }
    text = TEMPLATE
    for modality, (start, end) in frames.items():
        token = getattr(processor, f"{modality}_token", None) or ""
        text = text.replace(f"@{modality}@", f"{start}{token}{end}")
    return text


def _model(name: str, tokenizer: Any) -> hf.PreTrainedModel:
    """The family's tiny model with this tokenizer's ids and windows of SOUND_WINDOW_S seconds."""
    tiny = MEDIA_FAMILIES[name]().model
    config = tiny.config
    config.get_text_config().vocab_size = VOCAB_SIZE
    ids = tokenizer.convert_tokens_to_ids
    special = SPECIAL_TOKENS | OWN_TOKENS.get(name, {})
    tokens = {
        "image_token": special["image_token"], "video_token": special["video_token"],
        "audio_token": special["audio_token"], "vision_start_token": VISION_START,
        "vision_end_token": VISION_END,
        "audio_start_token": SOUND_START, "audio_end_token": SOUND_END, "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }  # fmt: skip
    for key, token in tokens.items():
        for ending in ("id", "index"):
            if getattr(config, f"{key}_{ending}", None) is not None:
                setattr(config, f"{key}_{ending}", ids(token))
    if name in ("qwen2_audio", "voxtral", "audioflamingo3", "glmasr"):
        config.audio_config.max_source_positions = SOUND_WINDOW_S * 50
    config.get_text_config().max_position_embeddings = 4096
    model = randomized(type(tiny)(config))
    model.generation_config.eos_token_id = None
    return model


# Processors

_QWEN_PATCHES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_AREA = {"shortest_edge": 256, "longest_edge": 2048}


def _qwen_vision(video_class: str = "Qwen2VLVideoProcessor", frames: int = 1) -> dict[str, Any]:
    area = {key: value * frames for key, value in _AREA.items()}
    return {
        "image_processor": hf.Qwen2VLImageProcessor(size=_AREA, **_QWEN_PATCHES),
        "video_processor": getattr(hf, video_class)(
            size=area, min_frames=4, max_frames=8, cap_pixels_per_frame=False, **_QWEN_PATCHES
        ),
    }


def _ears() -> hf.WhisperFeatureExtractor:
    return hf.WhisperFeatureExtractor(feature_size=16, chunk_length=SOUND_WINDOW_S)


def _qwen2_vl(tokenizer: Any) -> Any:
    return hf.Qwen2VLProcessor(tokenizer=tokenizer, **_qwen_vision())


def _qwen2_5_vl(tokenizer: Any) -> Any:
    return hf.Qwen2_5_VLProcessor(tokenizer=tokenizer, **_qwen_vision())


def _qwen3_vl(tokenizer: Any) -> Any:
    return hf.Qwen3VLProcessor(tokenizer=tokenizer, **_qwen_vision("Qwen3VLVideoProcessor", frames=8))


def _qwen2_5_omni(tokenizer: Any) -> Any:
    return hf.Qwen2_5OmniProcessor(tokenizer=tokenizer, feature_extractor=_ears(), **_qwen_vision())


def _qwen3_omni(tokenizer: Any) -> Any:
    return hf.Qwen3OmniMoeProcessor(tokenizer=tokenizer, feature_extractor=_ears(), **_qwen_vision())


def _glm(prefix: str, tokenizer: Any) -> Any:
    area = {key: 2 * value for key, value in _AREA.items()}  # it counts the two frames of a temporal patch
    clips = {key: 8 * value for key, value in _AREA.items()}
    images = getattr(hf, f"{prefix}ImageProcessor")(size=area, **_QWEN_PATCHES)
    videos = getattr(hf, f"{prefix}VideoProcessor")(size=clips, num_frames=8, **_QWEN_PATCHES)
    return getattr(hf, f"{prefix}Processor")(images, tokenizer, videos)


def _glm4v(tokenizer: Any) -> Any:
    return _glm("Glm4v", tokenizer)


def _glm46v(tokenizer: Any) -> Any:
    return _glm("Glm46V", tokenizer)


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


def _aya_vision(tokenizer: Any) -> Any:
    images = hf.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    return hf.AyaVisionProcessor(images, tokenizer, patch_size=4, img_size=16, downsample_factor=2)


def _cohere2_vision(tokenizer: Any) -> Any:
    images = hf.Cohere2VisionImageProcessor(size=_SQUARE, max_patches=4, patch_size=2)
    return hf.Cohere2VisionProcessor(images, tokenizer)


def _deepseek_vl(tokenizer: Any) -> Any:
    images = hf.DeepseekVLImageProcessor(size=_SQUARE, min_size=8)
    return hf.DeepseekVLProcessor(images, tokenizer, num_image_tokens=16)


def _lighton_ocr(tokenizer: Any) -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})
    return hf.LightOnOcrProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2)


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


def _qwen2_audio(tokenizer: Any) -> Any:
    return hf.Qwen2AudioProcessor(_ears(), tokenizer)


def _qwen3_asr(tokenizer: Any) -> Any:
    return hf.Qwen3ASRProcessor(hf.Qwen3ASRFeatureExtractor(feature_size=16), tokenizer)


def _audioflamingo3(tokenizer: Any) -> Any:
    return hf.AudioFlamingo3Processor(_ears(), tokenizer, audio_token=AUDIO, max_audio_len=6)


def _glmasr(tokenizer: Any) -> Any:
    return hf.GlmAsrProcessor(_ears(), tokenizer, audio_token=AUDIO, max_audio_len=6)


CALL_KWARGS: dict[str, dict[str, Any]] = {  # what these processors ignore in their own saved configuration
    "qwen2_5_omni": {"videos_kwargs": {"size": _AREA}},
    "qwen3_omni": {"videos_kwargs": {"size": _AREA}},
    "voxtral": {
        "audio_kwargs": {
            "pad_to_multiple_of": SOUND_WINDOW_S * 16_000, "max_source_positions": SOUND_WINDOW_S * 100
        }
    },
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
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni": _qwen3_omni,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "glm46v": _glm46v,
    "glm_ocr": _glm46v,
    "exaone4_5": _exaone4_5,
    "paddleocr_vl": _paddleocr_vl,
    "llava": _llava,
    "vipllava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "lighton_ocr": _lighton_ocr,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "deepseek_vl": _deepseek_vl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
    "qwen2_audio": _qwen2_audio,
    "qwen3_asr": _qwen3_asr,
    "audioflamingo3": _audioflamingo3,
    "glmasr": _glmasr,
}
FAMILIES = (*PROCESSORS, "voxtral")
