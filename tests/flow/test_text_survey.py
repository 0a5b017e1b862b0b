"""Every causal language model of the installed transformers, made tiny: its logits equal those of `generate`
behind a prompt longer than its window, or it is refused by name. None may differ in silence, and none may end
in a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.config.checkpoint import check_family
from cluster.config.families import MEDIA_FAMILIES
from cluster.config.hybrids import keeps_states
from cluster.errors import ConfigError
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.support import check_class, check_supported
from tests.flow.state_pair import StatePair
from tests.flow.test_families import BLOCK_SIZE, memory
from tests.flow.tiny_models import TinyRequest, randomized

pytestmark = pytest.mark.slow
NUM_TOKENS = 16
NUM_LAYERS = 4
WINDOW = 8
CHUNK = 7
TOLERANCE = 2e-3  # of the logits' spread; a lost window, mask or scale differs by 0.1 and more
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.15, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2,
    "query_pre_attn_scalar": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    # linear attention and state spaces
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "mamba_chunk_size": 8, "chunk_size": 8,
    # experts
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2,
    "moe_k": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "expert_ffn_hidden_size": 32,
    # compressed KV
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    # other families' words for the same
    "ffn_dim": 96, "ffn_hidden_size": 96, "n_embd": 64, "n_layer": NUM_LAYERS, "n_head": 4,
    "n_positions": 512,
    "n_inner": 96, "d_model": 64, "n_heads": 4, "n_layers": NUM_LAYERS, "num_layers": NUM_LAYERS,
    "max_seq_len": 512,
    "decoder_layers": NUM_LAYERS, "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "rotary_dim": 8,
    "word_embed_proj_dim": 64, "embed_dim": 64, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
# has no valid default
NEEDED: dict[str, dict[str, Any]] = {"gemma4_assistant": {"text_config": _NO_LAYER_INPUTS}}
OWN_SIZES: dict[str, dict[str, Any]] = {  # where the sizes above make no model, or not all of its rules
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "olmo_hybrid": {"linear_num_key_heads": 4, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "bailing_hybrid": {"n_group": 1, "num_experts": 8, "num_group": 1},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "attn_head_dim": 32},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}


def model_class(name: str) -> type[hf.PreTrainedModel]:
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return getattr(hf, found if isinstance(found, str) else found[0])


def default_config(name: str) -> hf.PreTrainedConfig:
    return CONFIG_MAPPING[name](**NEEDED.get(name, {}))


def tiny_config(name: str, **changes: Any) -> hf.PreTrainedConfig:
    default = default_config(name)
    sizes = {key: value for key, value in SIZES.items() if _can_set(default, key)}
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    if _can_set(default, "layer_types") and default.layer_types:
        kinds = list(dict.fromkeys(default.layer_types))
        sizes["layer_types"] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    return CONFIG_MAPPING[name](**sizes | OWN_SIZES.get(name, {}) | changes)


def _can_set(config: hf.PreTrainedConfig, key: str) -> bool:
    if key.endswith("_token_id"):
        return True
    known = getattr(type(config), key, None)
    if key in config.attribute_map or (isinstance(known, property) and known.fset is None):
        return False
    try:
        return hasattr(config, key)
    except AmbiguousGlobalPerLayerAttributeError:  # it has a value of its own in some layers
        return False


def check_by_name(name: str, config: hf.PreTrainedConfig) -> None:
    """What a start checks before it reads a weight. Raises ConfigError."""
    check_family({**config.to_dict(), "architectures": [model_class(name).__name__]})
    check_supported(config)
    check_class(model_class(name))


def their_logits(model: Any, request: TinyRequest) -> tuple[list[int], Tensor]:
    """The answer, and [NUM_TOKENS, vocab_size]."""
    ids = torch.tensor([request.token_ids])
    model.generation_config.eos_token_id = None
    given: Mapping[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    with torch.no_grad():
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **given
        )
    return output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float()


def our_logits(language: LanguageModel, request: TinyRequest, answer: list[int]) -> Tensor:
    """[NUM_TOKENS, vocab_size], along the same answer."""
    kv, table = memory(language, 16 + 2 * language.state_blocks), list(range(9, 0, -1))
    ids, positions = request.token_ids, language.positions(request.prompt).position_ids
    states = StatePair(language, 16)
    rows = []
    for start in range(0, len(ids), CHUNK):
        new = ids[start : start + CHUNK]
        own = positions[..., start : start + CHUNK]
        rows = [language.forward([SequenceChunk(new, own, start, table, states=states.of(len(new)))], kv)]
    for i, token_id in enumerate(answer[:-1]):
        at = len(ids) + i
        rows.append(language.forward([SequenceChunk([token_id], at, at, table, states=states.of(1))], kv))
    return torch.cat(rows)


@pytest.mark.parametrize("name", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(MEDIA_FAMILIES)))
def test_a_model_type_equals_generate_or_is_refused_by_name(name: str) -> None:
    try:
        check_by_name(name, default_config(name))
        torch.manual_seed(0)
        model = randomized(model_class(name)(tiny_config(name)))
        requests = [TinyRequest().text(count, seed) for seed, count in enumerate((37, 5, 61))]
        expected = [their_logits(model, request) for request in requests]
        language = LanguageModel.from_model(model, block_size=BLOCK_SIZE)
    except ConfigError as refusal:
        assert "is not supported" in str(refusal)
        return
    assert keeps_states(model.config.to_dict()) == (language.states is not None)
    for request, (answer, theirs) in zip(requests, expected, strict=True):
        ours = our_logits(language, request, answer)
        spread = float(theirs.std(dim=-1).mean())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE * spread)
