"""Model types some of whose layers keep states beside KV, and what config.json says of their mixers.

`cluster.model.state_probe` finds by itself which layers keep what; this is for what is refused before
anything is loaded. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.checkpoint import text_config

# Numbers that ranks must have equal shares of: what they are called in messages, and under which names
# configurations have them. A configuration without a name has transformers' default, which is not known here.
_DELTA = {"key heads": ("linear_num_key_heads",), "value heads": ("linear_num_value_heads",)}
_MAMBA = {"heads": ("mamba_n_heads", "mamba_num_heads"), "groups": ("mamba_n_groups", "n_groups")}
_CHANNELS = {"channels": ("hidden_size",)}
# By the type of the text model, or of the model that has it as `text_config`
_MIXERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid",
        ),
        _DELTA,
    ),
    **dict.fromkeys(("falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "nemotron_h_omni"), _MAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl"), _CHANNELS),
    "kimi_linear": {"heads": ("linear_num_heads", "linear_attn_config.num_heads")},
    "bailing_hybrid": {"heads": ("num_attention_heads",)},
    "lara_mini": {},  # ranks cannot share its mixers
}  # fmt: skip


_STATELESS = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}


def keeps_states(config: Mapping[str, Any]) -> bool:
    """config: as `read_config` gives it."""
    text = text_config(config)
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    return config["model_type"] in _MIXERS and (not kinds or not kinds <= _STATELESS)


def has_whole_mixers(config: Mapping[str, Any]) -> bool:
    """Whether the model keeps states that ranks cannot share."""
    return keeps_states(config) and not _MIXERS[config["model_type"]]


def mixer_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the numbers that the configuration says, by what they are. Empty for a model without mixers."""
    if not keeps_states(config):
        return {}
    text, found = text_config(config), {}
    for what, names in _MIXERS[config["model_type"]].items():
        number = next((number for name in names if isinstance(number := _at(text, name), int)), None)
        if number is not None and (what, number) != ("groups", 1):  # all ranks have the one group
            found[what] = number
    return found


def _at(config: Mapping[str, Any], path: str) -> Any:
    name, _, rest = path.partition(".")
    return _at(config.get(name) or {}, rest) if rest else config.get(name)
