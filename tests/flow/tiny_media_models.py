"""Tiny random models of every served multimodal family, with prompts whose media fit them. `MEDIA_FAMILIES`
maps a readable name to a builder of `TinyCase`.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import CONFIG_MAPPING

from cluster.config.families import family_of_type, lacks_package
from tests.flow import tiny_audio_models as audio
from tests.flow import tiny_gemma_models as gemma
from tests.flow import tiny_hybrid_models as hybrid
from tests.flow import tiny_packed_models as packed
from tests.flow import tiny_single_models as single
from tests.flow import tiny_tiled_models as tiled
from tests.flow.tiny_models import TinyCase

_BUILDERS = (
    packed.qwen2_vl, packed.qwen2_5_vl, packed.qwen3_vl, packed.qwen3_vl_moe, hybrid.qwen3_5,
    hybrid.lfm2_vl, hybrid.qwen3_5_moe, hybrid.lfm3_vl, hybrid.nemotron_h_omni, packed.qwen2_5_omni,
    packed.qwen3_omni,
    packed.glm4v, packed.glm4v_moe, packed.glm46v, packed.glmga, packed.glm_ocr, packed.exaone4_5,
    packed.paddleocr_vl, packed.cosmos3_omni, packed.cosmos3_edge, packed.cohere_compass, packed.hunyuan_vl,
    packed.kimi_k25, packed.hyperclovax_vision_v2, packed.muse_glimmer, packed.muse_spark,
    tiled.llava, tiled.vipllava, tiled.llava_next, tiled.llava_next_video, tiled.llava_onevision,
    tiled.internvl, tiled.gemma3, tiled.qianfan_ocr, tiled.perception_lm, tiled.fast_vlm, tiled.got_ocr2,
    tiled.janus, single.deepseek_vl_hybrid, single.deepseek_ocr2, single.step3p7, single.granite_docling,
    single.aria, tiled.llama4,
    tiled.mistral3, tiled.mistral3_of_mistral4, tiled.lighton_ocr,
    tiled.aya_vision, tiled.cohere2_vision, tiled.deepseek_vl, tiled.idefics3, tiled.smolvlm,
    gemma.gemma4, gemma.gemma4_small,
    audio.qwen2_audio, audio.qwen3_asr, audio.voxtral, audio.audioflamingo3, audio.musicflamingo,
    audio.glmasr, audio.moss_transcribe_diarize, audio.omniasr,
)  # fmt: skip
_NEW = ("nemotron_h_omni", "omniasr")  # not in every release of transformers that we run with
HYBRIDS = tuple(each.__name__ for each in _BUILDERS if each.__module__ == hybrid.__name__)
MEDIA_FAMILIES: dict[str, Callable[[], TinyCase]] = {
    builder.__name__: builder
    for builder in _BUILDERS
    if lacks_package(family_of_type(builder.__name__)) is None  # timm is not among the requirements
    and (builder.__name__ not in _NEW or builder.__name__ in CONFIG_MAPPING)
}
