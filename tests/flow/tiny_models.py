"""Tiny random float32 models of every served family, to compare the two halves with transformers' own
`generate`. Weights are large enough that answers vary. Here: what cases are made of, and the text families;
`tiny_media_models` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.request import Prompt

IMG, VID, AUD, VS, VE, AS, AE = 390, 391, 392, 393, 394, 395, 396  # placeholder and marker token ids
IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
PLACEHOLDER = {IMAGE: IMG, VIDEO: VID, AUDIO: AUD}
TEXT: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15,
    "eos_token_id": None,
    "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip


@dataclass
class TinyRequest:
    """One prompt, what its encoder items are, and what `generate` wants beside the ids."""

    token_ids: list[int] = field(default_factory=list)
    placed: list[PlacedMedia] = field(default_factory=list)
    items: list[tuple[Modality, Mapping[str, Tensor]]] = field(default_factory=list)
    generate_kwargs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def prompt(self) -> Prompt:
        return Prompt(tuple(self.token_ids), tuple(self.placed))

    def text(self, count: int, seed: int) -> TinyRequest:
        generator = torch.Generator().manual_seed(seed)
        return self.raw(*torch.randint(5, 290, (count,), generator=generator).tolist())

    def raw(self, *token_ids: int) -> TinyRequest:
        self.token_ids += token_ids
        return self

    def media(
        self,
        modality: Modality,
        item: Mapping[str, Tensor],
        geometry: MediaGeometry,
        parts: int = 1,
        between: Sequence[int] = (),
    ) -> TinyRequest:
        """`parts` ranges of equal length with the tokens `between` them."""
        length = geometry.num_tokens // parts
        step = length + len(between)
        ranges = tuple((len(self.token_ids) + i * step, length) for i in range(parts))
        self.placed.append(PlacedMedia(modality, f"{modality}-{len(self.placed)}", ranges, geometry))
        self.items.append((modality, item))
        placeholders = [PLACEHOLDER[modality]] * length
        return self.raw(*placeholders, *[*between, *placeholders] * (parts - 1))

    def given(self, **generate_kwargs: Tensor) -> TinyRequest:
        self.generate_kwargs.update(generate_kwargs)
        return self


@dataclass
class TinyCase:
    model: hf.PreTrainedModel
    requests: list[TinyRequest]

    def items(self) -> dict[Modality, list]:
        """Of all requests."""
        items: dict[Modality, list] = {}
        for modality, item in [pair for request in self.requests for pair in request.items]:
            items.setdefault(modality, []).append(item)
        return items


def collect(request: TinyRequest) -> TinyRequest:
    """The processor's joint tensors of a whole prompt, from its single items."""
    keys = {key for _, item in request.items for key in item}
    joint = {key: torch.cat([item[key] for _, item in request.items if key in item]) for key in sorted(keys)}
    return request.given(**joint)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def randomized(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Norms, biases and sinks get values of their own, so that losing one of them shows."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data = parameter.data.nan_to_num(0)
        if parameter.ndim == 1 or not parameter.any():  # Gemma3 makes its projection of zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.float().eval()


# ---------------------------------------------------------------------------------------------------- text
# families

_BASE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "eos_token_id": None,
    "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
HEAD_16: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {"sliding_window": 16}
MIXED_LAYERS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA: dict[str, Any] = {**HEAD_16, **_WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
TWO_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, **TWO_EXPERTS,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# queries are scaled by their positions
MISTRAL4: dict[str, Any] = {**DEEPSEEK, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}

# inputs of layers by token id; the last two layers attend over the KV of the first two
LAYER_INPUTS: dict[str, Any] = {
    **HEAD_16, **_WINDOW, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 2,
}  # fmt: skip
GEMMA4: dict[str, Any] = {**LAYER_INPUTS, "global_head_dim": 32, "final_logit_softcapping": 30.0}
GEMMA3N: dict[str, Any] = {
    **LAYER_INPUTS, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "laurel_rank": 8,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
# dense, then routed; layers without positions, which scale queries; no sequence is longer than a chunk
LLAMA4: dict[str, Any] = {
    **HEAD_16, "intermediate_size_mlp": 96, "num_local_experts": 4, "moe_layers": [1, 2],
    "no_rope_layers": [1, 0, 0], "attention_chunk_size": 80, "floor_scale": 80, "attn_scale": 5.0,
}  # fmt: skip

_TEXT_CONFIGS: dict[str, tuple[str, str, dict]] = {  # name: model class, configuration class, what differs from _BASE
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEAD_16),
    "mistral_window": ("MistralForCausalLM", "MistralConfig", _WINDOW),
    "phi3_window": ("Phi3ForCausalLM", "Phi3Config", _WINDOW),
    "gemma2_softcap_window": (
        "Gemma2ForCausalLM", "Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0}
    ),
    "gemma3_window": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GEMMA, **MIXED_LAYERS}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**HEAD_16, **TWO_EXPERTS, "num_experts": 4,
        "moe_intermediate_size": 32}
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss_sinks_window": (
        "GptOssForCausalLM", "GptOssConfig",
        {**HEAD_16, **_WINDOW, **TWO_EXPERTS, "num_local_experts": 4,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", HEAD_16),
    "cohere2_logit_scale": ("Cohere2ForCausalLM", "Cohere2Config", {**_WINDOW, **MIXED_LAYERS,
    "logit_scale": 0.25}),
    "granite_logits_scaling": (
        "GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}
    ),
    "deepseek_v3_mla": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK),
    "gemma3n_layer_inputs": ("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "gemma4_layer_inputs": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    "mistral4_mla": ("Mistral4ForCausalLM", "Mistral4Config", MISTRAL4),
    "llama4_chunks": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
}  # fmt: skip


def _text_case(name: str) -> TinyCase:
    model_class, config_class, changes = _TEXT_CONFIGS[name]
    torch.manual_seed(0)
    model = getattr(hf, model_class)(getattr(hf, config_class)(**{**_BASE, **changes}))
    requests = [TinyRequest().text(count, seed) for seed, count in enumerate((37, 5, 61, 16))]
    return TinyCase(randomized(model), requests)


TEXT_FAMILIES: dict[str, Callable[[], TinyCase]] = {
    name: (lambda name=name: _text_case(name)) for name in _TEXT_CONFIGS
}
