"""Model folders of every served multimodal family, as a client's operator would have them: a tiny random
model, the shipped demo model's tokenizer with the family's special tokens, the family's own processor, a chat
template. `FAMILIES` names them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf

from cluster.media.torchvision_compat import ensure_torchvision
from cluster.types.media import Modality
from tests.flow.family_processors import CALL_KWARGS, IMAGE, PROCESSORS, VIDEO
from tests.flow.sound_processors import AUDIO, WINDOW_S, ears
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import randomized
from tests.flow.voxtral_folder import VoxtralReference, write_preprocessor, write_tekken

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
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
_GEMMA4 = {"video_token": "<|video|>", "boa_token": "<|audio_bos|>", "eoa_token": "<|audio_eos|>"}
OWN_TOKENS = {  # that templates and processors of transformers write themselves
    "idefics3": {"image_token": "<image>"},
    "smolvlm": {"image_token": "<image>", "video_token": "<video>"},
    "aya_vision": {"image_token": "<|IMG_PATCH|>"},
    "got_ocr2": {"image_token": "<imgpad>"},
    "muse_glimmer": {"image_token": "<|patch|>", "video_token": "<|video|>"},
    **dict.fromkeys(("gemma4", "gemma4_small"), _GEMMA4),
    "step3p7": {"image_token": "<im_patch>"},
    "llama4": {"image_token": "<|patch|>"},
    "cohere_compass": {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
    "hunyuan_vl": {"image_start_token": "<|vision_bos|>", "image_end_token": "<|vision_eos|>"},
    "voxtral": {
        "audio_token": "[AUDIO]", "audio_bos_token": "[BEGIN_AUDIO]", "eos_token": "</s>",
        "instruction_token": "[INST]",
        "answer_token": "[/INST]", "call_token": "[TOOL_CALLS]",
    },
}  # fmt: skip
OTHER_TOKENS = [
    "[IMG_BREAK]", "[IMG_END]", "<end_of_utterance>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>",
    "TILE_GLOBAL", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>",
    "<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>",
    "<|VISION_START|>", "<|VISION_END|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip
GLM_CLIP = ("<|begin_of_video|>", "<|end_of_video|>")  # by which its processor finds clips in the prompt
WINDOWED = (  # their encoders take windows of a fixed length
    "qwen2_audio", "voxtral", "audioflamingo3", "musicflamingo", "glmasr", "moss_transcribe_diarize",
)  # fmt: skip
VOCAB_SIZE = 1088
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
    tokenizer = hf.AutoTokenizer.from_pretrained(
        DEMO_MODEL, extra_special_tokens=special_tokens, add_prefix_space=False
    )
    tokenizer.add_tokens(OTHER_TOKENS, special_tokens=True)
    processor = PROCESSORS[name](tokenizer)
    processor.chat_template = _template(name, processor)
    processor.save_pretrained(path)
    return hf.AutoProcessor.from_pretrained(path)


def _voxtral(path: Path) -> VoxtralReference:
    write_tekken(path, VOCAB_SIZE)
    write_preprocessor(path, ears())
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
        token = getattr(processor, f"{modality}_placeholder_token", token)
        text = text.replace(f"@{modality}@", f"{start}{token}{end}")
    return text


def _model(name: str, tokenizer: Any) -> hf.PreTrainedModel:
    """The family's tiny model with this tokenizer's ids and windows of WINDOW_S seconds."""
    tiny = MEDIA_FAMILIES[name]().model
    config = tiny.config
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config.get_text_config(), key):
            setattr(config.get_text_config(), key, VOCAB_SIZE)
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
    if name in WINDOWED:
        config.audio_config.max_source_positions = WINDOW_S * 50
    config.get_text_config().max_position_embeddings = 4096
    model = randomized(type(tiny)(config))
    model.generation_config.eos_token_id = None
    return model


FAMILIES = (*(name for name in PROCESSORS if name in MEDIA_FAMILIES), "voxtral")
