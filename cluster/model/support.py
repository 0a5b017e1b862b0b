"""Which models this package can run, and what a language model does to its logits.

What is known per model type stands in `cluster.config.families`. This module adds the checks that need
transformers: first on the configuration, before any weight is read (`check_supported`), then on the text
model's class (`check_class`). Holds no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.config.checkpoint import why_not_computed
from cluster.config.families import MEDIA_FAMILIES, ModelFamily, family_of_type, no_adapter, why_refused
from cluster.errors import ConfigError

# keep KV alone; no sequence is longer than a chunk (`length_limit`)
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# Of the others, `probe` says whether what they keep beside KV can be served
_LAYERS = (*_ATTENTION_LAYERS, "linear_attention", "conv", "mamba", "hybrid", "attention", "mlp", "moe")
TEXT_ALONE = ("mistral4",)  # causal language models that transformers lists as multimodal only
_CAUSAL_LANGUAGE_MODELS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TEXT_ALONE}
_MULTIPLIED_BY_SCALING = ("hyperclovax",)  # whose logits are; those of others are divided by it


def family_of(config: PreTrainedConfig) -> ModelFamily:
    """Raises ConfigError for a model this layer cannot run; the message names it and says why."""
    check_supported(config)
    return family_of_type(config.model_type)


def check_supported(config: PreTrainedConfig) -> None:
    name = config.model_type
    if reason := why_refused(name):
        _refuse(name, reason)
    if config.is_encoder_decoder:
        _refuse(name, "it is an encoder-decoder model; only decoder-only language models are served")
    if name not in MEDIA_FAMILIES and name not in _CAUSAL_LANGUAGE_MODELS:
        _refuse(
            name, f"it has no adapter; multimodal model types with one: {', '.join(sorted(MEDIA_FAMILIES))}"
        )
    text = config.get_text_config()
    if name not in MEDIA_FAMILIES and text is not config:
        _refuse(name, no_adapter())
    if reason := why_not_computed(name, text.to_dict()):
        _refuse(name, reason)
    layer_types = set(getattr(text, "layer_types", None) or ())
    if other := sorted(layer_types.difference(_LAYERS)):
        _refuse(name, f"its layers of type {', '.join(other)} keep more than KV and states")


def check_class(model_class: type) -> None:
    """The checks on the class of the text model: nothing but states, and attention that cannot be replaced.
    Raises ConfigError."""
    name = model_class.config_class.model_type if model_class.config_class else model_class.__name__
    if model_class._is_stateful and model_class.base_model_prefix != "model":
        _refuse(name, f"{model_class.__name__} has no backbone named 'model'")
    # of hybrids transformers says so although their attention does; the probe sees it
    if not model_class._supports_attention_backend and not model_class._is_stateful:
        _refuse(name, f"{model_class.__name__} does not call transformers' attention interface")


def may_keep_states(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether some layers of the text model are said to keep something else than KV."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return model_class._is_stateful or not kinds.issubset(_ATTENTION_LAYERS)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """What holds the text model and the media encoders. Raises ConfigError."""
    name = family_of_type(model.config.model_type).base_module
    if not name:
        return model
    if not hasattr(model, name):
        _refuse(model.config.model_type, f"{type(model).__name__} has no backbone named '{name}'")
    return cast(PreTrainedModel, getattr(model, name))


def text_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text model. Raises ConfigError."""
    base, family = backbone_of(model), family_of(model.config)
    return cast(PreTrainedModel, base.get_submodule(family.text_module)) if family.modalities else base


def head_owner(model: PreTrainedModel) -> PreTrainedModel:
    """The model whose forward ends with the head: in some families a causal language model inside."""
    path = family_of(model.config).text_module.rpartition(".")[0]
    return cast(PreTrainedModel, backbone_of(model).get_submodule(path)) if path else model


def head_of(model: PreTrainedModel) -> nn.Linear:
    """What makes logits of the text model's last hidden states."""
    return cast(nn.Linear, head_owner(model).get_output_embeddings())


def leave_out_query_scales(text_model: nn.Module) -> None:
    """Llama 4 scales queries by their places in the step, which are their positions in `generate` alone. All
    scales are 1 in sequences of the length that is served (`length_limit`)."""
    for module in text_model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False  # pyright: ignore[reportAttributeAccessIssue]


def post_head(config: PreTrainedConfig) -> Callable[[Tensor], Tensor] | None:
    """What the family's ForCausalLM does to the logits after the head; None: nothing. `probe` compares it
    with the real one."""
    if family_of_type(config.model_type).leaves_logits:
        return None
    text = config.get_text_config()
    cap, multiplier = getattr(text, "final_logit_softcapping", None), getattr(text, "output_multiplier", None)
    scaling, factor = getattr(text, "logits_scaling", None), getattr(text, "logit_scale", None)
    if cap and multiplier:
        return lambda logits: (logits * multiplier / cap).tanh() * cap
    if cap:
        return lambda logits: (logits / cap).tanh() * cap
    if scaling and text.model_type in _MULTIPLIED_BY_SCALING:
        return lambda logits: logits * scaling
    if scaling:
        return lambda logits: logits / scaling
    if factor:
        return lambda logits: logits * factor
    return None


def has_windowed_spans(config: PreTrainedConfig) -> bool:
    """Whether the tokens of an image or of a clip's frame see each other in layers with a window, and only in
    these (Gemma 4)."""
    return getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"


def num_deepstack_layers(config: PreTrainedConfig) -> int:
    """Number of layers of the language model that add their own vision feature to the media rows (Qwen3-VL,
    Qwen3-Omni)."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(f"model type '{name}' is not supported: {reason}")
