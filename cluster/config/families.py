"""What differs between multimodal model types: one static `ModelFamily` record for each. No torch, no
transformers.

The launcher, the composition, the door's media processor, the encoder and the language model all read these
records. To add a family whose encoder and positions have a known form, add one record here. A new form also
gets a function in `cluster.model.media_calls` or `cluster.model.positions`.

A model type without a record is served as text if it is a plain causal language model. Otherwise it is
refused by name, with its cause where `refused` has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib.util import find_spec
from typing import Any

from cluster.config.refused import REFUSED
from cluster.types.media import Modality


class EncoderForm(Enum):
    """What an encoder takes for several media items at once; `cluster.model.media_calls` has one function for
    each form."""

    PACKED_IMAGES = auto()  # patches of all images in one sequence
    PACKED_VIDEOS = auto()  # patches of all clips in one sequence
    TILED_IMAGES = auto()  # tiles of one size, the same number of rows from each
    UNPROJECTED_TILES = auto()  # the same; the projector is called after the tower
    SIZED_IMAGES = auto()  # padded pixels and the true image sizes
    STACKED_VIDEOS = auto()  # frames of one size; a newline row ends each clip
    MASKED_TILES = auto()  # tiles and a mask of their valid pixels
    FRAMES = auto()  # frames of one size, the same number of rows from each
    COUNTED_FRAMES = auto()  # frames of one size, listed; their number beside them
    STACKED_TILES = auto()  # tiles or frames of one size, by one method for both
    MASKED_CROPS = auto()  # one image per call: crops of one size and a mask of their valid pixels
    SINGLE_IMAGES = auto()  # one image per call, whatever tensors the processor makes of it
    MEL_WINDOWS = auto()  # windows of a spectrum, with or without a mask of the valid frames
    MASKED_SOUND = auto()  # one sound per call; the encoder tells valid rows from padding
    TIMED_MEL_WINDOWS = auto()  # the same; each window gets its position in the sound
    PADDED_MELS = auto()  # Qwen2.5-Omni: spectra padded to the longest, with a mask
    SINGLE_MELS = auto()  # Qwen3-Omni: one spectrum per call, with a mask
    FIXED_MEL_WINDOW = auto()  # Qwen2-Audio: one window of 30 s, with a mask
    WAVEFORMS = auto()  # one sound per call, as samples


class PositionForm(Enum):
    """How prompt tokens get their rotary positions; `cluster.model.positions` has one rule for each form."""

    ONE_DIMENSIONAL = auto()
    QWEN_VL = auto()  # time, height, width
    HUNYUAN_VL = auto()  # an image's column, row and number; text is counted on
    QWEN_OMNI = auto()  # time, height, width; sound and pictures are aligned in time


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint that also holds a speech generator, which is not served. The family is the part under
    `part_key`."""

    model_type: str
    part_key: str  # in config.json
    part_class: str  # of transformers


@dataclass(frozen=True)
class ModelFamily:
    model_type: str  # as in config.json; of a part: as transformers names the part
    encoders: Mapping[Modality, EncoderForm] = field(default_factory=dict)  # empty: text only
    positions: PositionForm = PositionForm.ONE_DIMENSIONAL
    base_module: str = "model"  # name of what holds encoders and text backbone; "": the model itself does
    text_module: str = "language_model"  # path of the text backbone inside the base
    # tokens of one item see each other: a prefill chunk must not cut an item
    is_media_bidirectional: bool = False
    can_pool: bool = False  # embedding rows lie on a grid and carry no deep-stack features
    bounds_whole_clips: bool = False  # the processor's pixel bounds hold for all frames of a clip together
    frames_of_an_image: int = 1  # the processor's pixel bounds take an image for a clip of so many frames
    clips_are_written_as_images: bool = False  # the image's token stands for a clip's rows, too
    # as this token, or the one of this name in the text configuration; also those that it generated
    reads_placeholders_as: int | str | None = None
    leaves_logits: bool = False  # transformers does not scale them as the text configuration says
    package: str = ""  # that transformers needs for it, besides the requirements
    hears_clips: bool = False  # the processor takes a clip with its sound track
    cuts_sounds: bool = False  # into windows, of which its feature extractor truncates each
    whole: WholeCheckpoint | None = None
    older_names: Mapping[str, str] = field(default_factory=dict)  # of entries in config.json: today's names

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return tuple(self.encoders)

    def encoders_of(self, config: Mapping[str, Any]) -> Mapping[Modality, EncoderForm]:
        """Those that a checkpoint with this configuration has: it may leave some out. Clips are not served
        of one that drops rows of theirs by what they show: then the text depends on the pixels."""
        parts = {Modality.AUDIO: "audio_config"}
        return {
            modality: form
            for modality, form in self.encoders.items()
            if config.get(parts.get(modality, "vision_config"), form) is not None
            and not (modality is Modality.VIDEO and config.get("video_pruning_rate"))
        }


TEXT = ModelFamily("")  # any plain causal language model

_VISION = {Modality.IMAGE: EncoderForm.PACKED_IMAGES, Modality.VIDEO: EncoderForm.PACKED_VIDEOS}
_PACKED = {Modality.IMAGE: EncoderForm.PACKED_IMAGES}
_TILES = {Modality.IMAGE: EncoderForm.TILED_IMAGES}
_SIZED = {Modality.IMAGE: EncoderForm.SIZED_IMAGES}
_MASKED_TILES = {Modality.IMAGE: EncoderForm.MASKED_TILES}
_STACKED_TILES = {
    Modality.IMAGE: EncoderForm.STACKED_TILES,
    Modality.VIDEO: EncoderForm.STACKED_TILES,
}
_SINGLE = {Modality.IMAGE: EncoderForm.SINGLE_IMAGES}
_MELS = {Modality.AUDIO: EncoderForm.MEL_WINDOWS}

_GEMMA4 = {
    **_SINGLE, Modality.VIDEO: EncoderForm.COUNTED_FRAMES, Modality.AUDIO: EncoderForm.MASKED_SOUND
}  # fmt: skip
_GLM: Mapping[str, Any] = {
    "bounds_whole_clips": True, "frames_of_an_image": 2, "clips_are_written_as_images": True
}  # fmt: skip

_RECORDS = (
    ModelFamily("qwen2_vl", _VISION, PositionForm.QWEN_VL, can_pool=True),
    ModelFamily("qwen2_5_vl", _VISION, PositionForm.QWEN_VL, can_pool=True),
    ModelFamily("qwen3_vl", _VISION, PositionForm.QWEN_VL, bounds_whole_clips=True),
    ModelFamily("qwen3_vl_moe", _VISION, PositionForm.QWEN_VL, bounds_whole_clips=True),
    ModelFamily("qwen3_5", _VISION, PositionForm.QWEN_VL, bounds_whole_clips=True),
    ModelFamily("qwen3_5_moe", _VISION, PositionForm.QWEN_VL, bounds_whole_clips=True),
    ModelFamily(
        "qwen2_5_omni_thinker",
        {**_VISION, Modality.AUDIO: EncoderForm.PADDED_MELS},
        PositionForm.QWEN_OMNI,
        can_pool=True,
        hears_clips=True,
        whole=WholeCheckpoint("qwen2_5_omni", "thinker_config", "Qwen2_5OmniThinkerForConditionalGeneration"),
    ),
    ModelFamily(
        "qwen3_omni_moe_thinker",
        {**_VISION, Modality.AUDIO: EncoderForm.SINGLE_MELS},
        PositionForm.QWEN_OMNI,
        hears_clips=True,
        whole=WholeCheckpoint(
            "qwen3_omni_moe", "thinker_config", "Qwen3OmniMoeThinkerForConditionalGeneration"
        ),
    ),
    ModelFamily("glm4v", _VISION, PositionForm.QWEN_VL, **_GLM),
    ModelFamily("glm4v_moe", _VISION, PositionForm.QWEN_VL, **_GLM),
    ModelFamily("glm46v", _VISION, PositionForm.QWEN_VL, **_GLM),
    ModelFamily("glm_ocr", _VISION, PositionForm.QWEN_VL, **_GLM),
    ModelFamily("glmga", _VISION, PositionForm.QWEN_VL, **_GLM),
    ModelFamily("exaone4_5", _VISION),
    ModelFamily("cosmos3_omni", _VISION, PositionForm.QWEN_VL, bounds_whole_clips=True),
    ModelFamily("cohere_compass", _VISION, PositionForm.QWEN_VL, bounds_whole_clips=True),
    ModelFamily("cosmos3_edge", _PACKED, PositionForm.QWEN_VL),
    ModelFamily("muse_glimmer", _VISION, reads_placeholders_as=0),
    ModelFamily("muse_spark", _VISION, reads_placeholders_as=0),
    ModelFamily("paddleocr_vl", _PACKED, PositionForm.QWEN_VL),
    ModelFamily("hunyuan_vl", _PACKED, PositionForm.HUNYUAN_VL),
    ModelFamily("kimi_k25", _PACKED, reads_placeholders_as=0),
    ModelFamily("hyperclovax_vision_v2", _PACKED),
    ModelFamily("llava", _TILES),
    ModelFamily("vipllava", _TILES),
    ModelFamily("llava_next", _SIZED),
    ModelFamily("llava_next_video", {**_SIZED, Modality.VIDEO: EncoderForm.FRAMES}),
    ModelFamily("llava_onevision", {**_SIZED, Modality.VIDEO: EncoderForm.STACKED_VIDEOS}),
    ModelFamily("internvl", {**_TILES, Modality.VIDEO: EncoderForm.TILED_IMAGES}),
    ModelFamily("perception_lm", _STACKED_TILES, package="timm"),
    ModelFamily("fast_vlm", _TILES, package="timm"),
    ModelFamily("qianfan_ocr", _TILES),
    ModelFamily("got_ocr2", _TILES),
    ModelFamily("janus", _TILES),
    ModelFamily("deepseek_vl_hybrid", _SINGLE),
    ModelFamily("deepseek_ocr2", _SINGLE),
    ModelFamily("step3p7", _SINGLE),
    ModelFamily("aria", {Modality.IMAGE: EncoderForm.MASKED_CROPS}),
    ModelFamily("aya_vision", _TILES, leaves_logits=True),
    ModelFamily("cohere2_vision", _TILES, leaves_logits=True),
    ModelFamily("deepseek_vl", _TILES),
    ModelFamily(
        "llama4",
        {Modality.IMAGE: EncoderForm.UNPROJECTED_TILES},
        base_module="",
        text_module="language_model.model",
    ),
    ModelFamily("mistral3", _SIZED),
    ModelFamily("lighton_ocr", _SIZED),
    ModelFamily("idefics3", _MASKED_TILES, text_module="text_model"),
    ModelFamily(
        "smolvlm", {**_MASKED_TILES, Modality.VIDEO: EncoderForm.MASKED_TILES}, text_module="text_model"
    ),
    ModelFamily("granite_docling", _SINGLE, text_module="text_model"),
    ModelFamily("lfm2_vl", _SINGLE),
    ModelFamily("lfm3_vl", _VISION, bounds_whole_clips=True),
    ModelFamily(
        "nemotron_h_omni",
        {**_SINGLE, Modality.VIDEO: EncoderForm.FRAMES, **_MELS},
        base_module="",
        text_module="language_model.model",
        clips_are_written_as_images=True,
        older_names={
            "llm_config": "text_config",
            "sound_config": "audio_config",
            "img_context_token_id": "image_token_id",
            "sound_context_token_id": "audio_token_id",
        },
    ),
    ModelFamily("gemma3", _TILES, is_media_bidirectional=True),
    ModelFamily("gemma4", _GEMMA4, reads_placeholders_as="pad_token_id"),
    ModelFamily("qwen2_audio", {Modality.AUDIO: EncoderForm.FIXED_MEL_WINDOW}),
    ModelFamily("voxtral", _MELS),
    ModelFamily("qwen3_asr", _MELS),
    ModelFamily("audioflamingo3", _MELS),
    ModelFamily("musicflamingo", {Modality.AUDIO: EncoderForm.TIMED_MEL_WINDOWS}),
    ModelFamily("glmasr", _MELS),
    ModelFamily("moss_transcribe_diarize", _MELS, cuts_sounds=True),
    ModelFamily("omniasr", {Modality.AUDIO: EncoderForm.WAVEFORMS}),
)

MEDIA_FAMILIES: Mapping[str, ModelFamily] = {family.model_type: family for family in _RECORDS}
_BY_WHOLE = {family.whole.model_type: family for family in _RECORDS if family.whole is not None}


def family_of_type(model_type: str) -> ModelFamily:
    """The record of a served part or model; `TEXT` for a model type without one."""
    return MEDIA_FAMILIES.get(model_type, TEXT)


def part_of_whole(model_type: str) -> tuple[ModelFamily, WholeCheckpoint] | None:
    """The family of the part that is served of a checkpoint of this type; None: the whole checkpoint is
    served."""
    family = _BY_WHOLE.get(model_type)
    return None if family is None or family.whole is None else (family, family.whole)


def lacks_package(family: ModelFamily) -> str | None:
    """The reason for refusing the family where its package is not installed."""
    if not family.package or find_spec(family.package) is not None:
        return None
    return f"transformers needs the package {family.package} for it (pip install {family.package})"


def why_refused(model_type: str) -> str | None:
    """The reason for refusing what this name says by itself; None: nothing speaks against it."""
    return REFUSED.get(model_type) or lacks_package(family_of_type(model_type))


def no_adapter() -> str:
    """The reason for refusing a multimodal model type without a record."""
    return f"it is multimodal and has no adapter; model types with one: {', '.join(sorted(MEDIA_FAMILIES))}"
