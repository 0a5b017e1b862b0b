"""Tiny random models of every served multimodal family, with prompts whose media fit them. `MEDIA_FAMILIES`
maps a readable name to a builder of `TinyCase`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.flow import tiny_audio_models as audio
from tests.flow import tiny_packed_models as packed
from tests.flow import tiny_tiled_models as tiled
from tests.flow.tiny_models import TinyCase

_BUILDERS = (
    packed.qwen2_vl, packed.qwen2_5_vl, packed.qwen3_vl, packed.qwen3_vl_moe, packed.qwen2_5_omni,
    packed.qwen3_omni,
    packed.glm4v, packed.glm4v_moe, packed.glm46v, packed.glm_ocr, packed.exaone4_5, packed.paddleocr_vl,
    tiled.llava, tiled.vipllava, tiled.llava_next, tiled.llava_onevision, tiled.internvl, tiled.gemma3,
    tiled.mistral3, tiled.lighton_ocr,
    tiled.aya_vision, tiled.cohere2_vision, tiled.deepseek_vl, tiled.idefics3, tiled.smolvlm,
    audio.qwen2_audio, audio.qwen3_asr, audio.voxtral, audio.audioflamingo3, audio.glmasr,
)  # fmt: skip
MEDIA_FAMILIES: dict[str, Callable[[], TinyCase]] = {builder.__name__: builder for builder in _BUILDERS}
