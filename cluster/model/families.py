"""What differs between model types, one `Family` each; everything else is shared. Reads configurations and calls the
media methods of transformers' models; holds no state.

A model type that is not listed here is served as text if it is a plain causal language model, and refused by name
otherwise. `check_supported` works on the configuration alone, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.errors import ConfigError
from cluster.model import media_calls as calls
from cluster.model import positions as pos
from cluster.model.media_calls import EncodeCall
from cluster.types.media import Modality

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO


@dataclass(frozen=True)
class Family:
    encode: Mapping[Modality, EncodeCall]  # empty: text only
    positions: pos.PositionRule = pos.ONE_DIMENSIONAL
    text_module: str = "language_model"  # name of the text backbone inside `model.model`
    bidirectional_media: bool = False  # tokens of one item see each other, so a chunk must not cut an item

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return tuple(self.encode)


TEXT = Family(encode={})
_PACKED_VISION = {IMAGE: calls.packed_patches(IMAGE), VIDEO: calls.packed_patches(VIDEO)}
_QWEN_VL = Family(_PACKED_VISION, pos.QWEN_VL)
_GRID_IMAGE = {IMAGE: calls.tiled_images}
_MASKED_MELS = {AUDIO: calls.windowed_mels("input_features_mask")}

FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "qwen2_5_omni_thinker": Family({**_PACKED_VISION, AUDIO: calls.qwen2_5_omni_audio}, pos.QWEN_OMNI),
    "qwen3_omni_moe_thinker": Family({**_PACKED_VISION, AUDIO: calls.qwen3_omni_audio}, pos.QWEN_OMNI),
    "llava": Family(_GRID_IMAGE),
    "llava_next": Family({IMAGE: calls.sized_images}),
    "llava_onevision": Family({IMAGE: calls.sized_images, VIDEO: calls.stacked_videos}),
    "internvl": Family({IMAGE: calls.tiled_images, VIDEO: calls.tiled_images}),
    "mistral3": Family({IMAGE: calls.sized_images}),
    "idefics3": Family({IMAGE: calls.masked_tiles}, text_module="text_model"),
    "smolvlm": Family({IMAGE: calls.masked_tiles, VIDEO: calls.masked_tiles}, text_module="text_model"),
    "gemma3": Family(_GRID_IMAGE, bidirectional_media=True),
    "qwen2_audio": Family({AUDIO: calls.qwen2_audio}),
    "voxtral": Family({AUDIO: calls.windowed_mels(None)}),
    "audioflamingo3": Family(_MASKED_MELS),
    "glmasr": Family(_MASKED_MELS),
}

_ATTENTION_LAYERS = ("full_attention", "sliding_attention")


def family_of(config: PreTrainedConfig) -> Family:
    """Raises ConfigError for a model this layer cannot run; the message names it and says why."""
    check_supported(config)
    return FAMILIES.get(config.model_type, TEXT)


def check_supported(config: PreTrainedConfig) -> None:
    name = config.model_type
    if config.is_encoder_decoder:
        _refuse(name, "it is an encoder-decoder model; only decoder-only language models are served")
    if name not in FAMILIES and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        _refuse(name, f"it has no adapter; multimodal model types with one: {', '.join(sorted(FAMILIES))}")
    text = config.get_text_config()
    if name not in FAMILIES and text is not config:
        _refuse(
            name, f"it is multimodal and has no adapter; model types with one: {', '.join(sorted(FAMILIES))}"
        )
    if getattr(text, "attention_chunk_size", None) is not None:
        _refuse(
            name, "its chunked attention (attention_chunk_size) is not expressed in the attention interface"
        )
    layer_types = set(getattr(text, "layer_types", None) or _ATTENTION_LAYERS)
    if other := sorted(layer_types.difference(_ATTENTION_LAYERS)):
        _refuse(name, f"its layers of type {', '.join(other)} keep state that a block of KV cannot hold")


def check_class(model_class: type) -> None:
    """The second half of `check_supported`, on the class of the text model: recurrent state, fixed attention."""
    name = model_class.config_class.model_type if model_class.config_class else model_class.__name__
    if model_class._is_stateful:
        _refuse(name, f"{model_class.__name__} keeps recurrent (SSM or linear-attention) state")
    if not model_class._supports_attention_backend:
        _refuse(name, f"{model_class.__name__} does not call transformers' attention interface")


def post_head(config: PreTrainedConfig) -> Callable[[Tensor], Tensor]:
    """What the family's ForCausalLM does to the logits after the head; LanguageModel checks it against the real one."""
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    divisor = getattr(text, "logits_scaling", None)
    factor = getattr(text, "logit_scale", None)
    if cap:
        return lambda logits: (logits / cap).tanh() * cap
    if divisor:
        return lambda logits: logits / divisor
    if factor:
        return lambda logits: logits * factor
    return lambda logits: logits


def num_deepstack_layers(config: PreTrainedConfig) -> int:
    """Layers of the language model that add a vision feature of their own to the media rows (Qwen3-VL, Qwen3-Omni)."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(f"model type '{name}' is not supported: {reason}")
