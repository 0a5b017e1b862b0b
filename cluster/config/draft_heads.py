"""What is known of a head that drafts tokens before anything is loaded: from configurations and headers.

    mtp      the layer for multi-token prediction in the served checkpoint
    eagle3   a folder of its own, as SpecForge and the authors of EAGLE-3 publish them

No torch. Raises ConfigError for what cannot draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.checkpoint import read_config, read_headers, read_json, text_config, weight_files
from cluster.config.hybrids import keeps_states
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError

# Whose layer transformers' MtpModel computes as a decoder layer, and a tensor that it has: the layer is the
# one after the model's own layers, or has names of its own
MTP_TYPES = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), "model.layers.{num_layers}.eh_proj.weight"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "mtp.fc.weight"
    ),
}
EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_METHOD, _MODEL = "decode.speculation.method", "decode.speculation.model"


@dataclass(frozen=True)
class Eagle3Head:
    """What the folder of an EAGLE-3 head says."""

    folder: Path
    config: Mapping[str, Any]
    layers: tuple[int, ...]  # of the target, whose inputs it reads
    target_hidden_size: int
    draft_vocab_size: int


def layers_read(args: ClusterArgs) -> tuple[int, ...] | None:
    """The layers of the model whose inputs the head reads, by the settings; empty: it reads what the text
    model returns. None: no head drafts. Reads configurations and headers of weights."""
    match args.decode.speculation.method:
        case "mtp":
            check_mtp(Path(args.model))
            return ()
        case "eagle3":
            return read_eagle3(Path(args.decode.speculation.model), read_config(args.model)).layers
        case _:
            return None


def check_mtp(folder: Path) -> str:
    """`folder`: of the served model. Returns what the names of the layer's tensors begin with."""
    config = read_config(folder)
    model_type, num_layers = config["model_type"], text_config(config).get("num_hidden_layers")
    if model_type not in MTP_TYPES:
        raise ConfigError(
            f"speculation method mtp: model type '{model_type}' is not one of {', '.join(MTP_TYPES)}",
            param=_METHOD,
        )
    if not _last_has_attention(config):
        raise ConfigError(
            "speculation method mtp: the head is like the model's last layer, which has no attention",
            param=_METHOD,
        )
    needed = MTP_TYPES[model_type].format(num_layers=num_layers)
    if not any(needed in read_headers(file) for file in weight_files(folder)):
        raise ConfigError(
            f"speculation method mtp: the checkpoint '{folder}' has no weights for it: {needed} is missing",
            param=_METHOD,
        )
    return needed.rsplit(".", 2)[0] + "."


def _last_has_attention(config: Mapping[str, Any]) -> bool:
    """Whether a model's last layer has attention: of model types with states, with transformers' defaults for
    what the configuration leaves out."""
    if not keeps_states(config):
        return True
    text = text_config(config)
    if kinds := text.get("layer_types"):
        return kinds[-1] == "full_attention"
    return (text.get("num_hidden_layers") or 0) % (text.get("full_attention_interval") or 4) == 0


def read_eagle3(folder: Path, target: Mapping[str, Any]) -> Eagle3Head:
    """target: configuration of the served model."""
    config = read_json(folder / "config.json")
    if not set(config.get("architectures") or ()).intersection(EAGLE3_CLASSES):
        raise ConfigError(
            f"'{folder}' is no EAGLE-3 head: its class is {config.get('architectures')}, "
            f"not {EAGLE3_CLASSES[0]}",
            param=_MODEL,
        )
    text = text_config(target)
    num_layers, hidden_size, vocab_size = (
        text.get(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    if num_layers is None or hidden_size is None or vocab_size is None:
        raise ConfigError(
            f"speculation method eagle3: not for model type '{text.get('model_type')}'", param=_METHOD
        )
    own = (config.get("hidden_size"), config.get("target_hidden_size") or hidden_size)
    if strange := [size for size in own if size != hidden_size]:
        raise ConfigError(
            f"the EAGLE-3 head '{folder}' is for hidden rows of {strange[0]}, not {hidden_size}", param=_MODEL
        )
    if config.get("vocab_size") != vocab_size:
        raise ConfigError(
            f"the EAGLE-3 head '{folder}' ({config.get('vocab_size')} tokens) "
            f"and the model ({vocab_size} tokens) must have the same vocabulary",
            param=_MODEL,
        )
    named = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    if len(layers) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError(
            f"the EAGLE-3 head '{folder}' reads inputs of the layers {list(layers)} of {num_layers}",
            param=_MODEL,
        )
    return Eagle3Head(folder, config, layers, hidden_size, config.get("draft_vocab_size") or vocab_size)
