"""How ranks divide what transformers' own plans leave whole in hybrid models: attention and plain MLPs.
Mixers: `mixer_shares`."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from cluster.model.sharding import name_in_plan

_ATTENTION = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkvg"), "colwise"),
    **dict.fromkeys(("layers.*.self_attn.o_proj", "layers.*.self_attn.out_proj"), "rowwise"),
}
# its norms of queries and keys span all heads
_WHOLE_ATTENTION = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise_gather_output"),
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}
_LATENT_ATTENTION = {  # gates of heads, where there are some
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in ("q", "q_b", "kv_b", "g")), "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
}


def _mlp(path: str, inputs: tuple[str, ...] = ("gate_proj", "up_proj"), output: str = "down_proj") -> dict:
    return {**{f"{path}.{name}": "colwise" for name in inputs}, f"{path}.{output}": "rowwise"}


_LFM = {**_ATTENTION, **_mlp("layers.*.feed_forward", ("w1", "w3"), "w2")}
_FORWARD = {**_ATTENTION, **_mlp("layers.*.feed_forward")}
# By model type of the text model
_PLANS: Mapping[str, Mapping[str, str]] = {
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "lfm3": _LFM,
    "falcon_h1": _FORWARD,
    "bamba": _FORWARD,
    "granitemoehybrid": {
        **_ATTENTION,
        "layers.*.shared_mlp.input_linear": "packed_colwise",
        "layers.*.shared_mlp.output_linear": "rowwise",
    },
    "nemotron_h": {
        **{path.replace("self_attn", "mixer"): way for path, way in _ATTENTION.items()},
        **_mlp("layers.*.mixer", ("up_proj",)),
        **_mlp("layers.*.mixer.shared_experts", ("up_proj",)),
    },
    "olmo_hybrid": {**_WHOLE_ATTENTION, **_mlp("layers.*.mlp")},
    "kimi_linear": _LATENT_ATTENTION,
    "bailing_hybrid": _LATENT_ATTENTION,
}


def complete_plan(model: PreTrainedModel, text: PreTrainedModel) -> None:
    """model: on the meta device; `text` is a part of it, or all of it. What the plan says already stays."""
    paths = {module: name for name, module in model.named_modules()}
    names = set(map(name_in_plan, paths.values()))
    prefix = f"{paths[text]}." if paths[text] else ""
    added = {f"{prefix}{part}": way for part, way in _PLANS.get(text.config.model_type, {}).items()}
    model._tp_plan = {part: way for part, way in added.items() if part in names} | model.tp_plan
