"""Folders of tiny hybrid models: some of their layers keep a state instead of KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

from tests.flow.text_models import SIZES, save_text_model

_LAYERS: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": None}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
CONFIGS: dict[str, hf.PretrainedConfig] = {
    "qwen3_5_text": hf.Qwen3_5TextConfig(
        **_LAYERS, layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    "lfm2": hf.Lfm2Config(**_LAYERS, layer_types=["conv", "conv", "full_attention", "conv"]),
    # each of its layers has attention and a mixer
    "falcon_h1": hf.FalconH1Config(**{**_LAYERS, "num_hidden_layers": 2}, **_MAMBA, mamba_d_ssm=128),
}  # fmt: skip
# Of other kinds of mixers: what kernels compute is compared with `generate`
OTHERS: dict[str, hf.PretrainedConfig] = {
    "nemotron_h": hf.NemotronHConfig(
        **{**SIZES, "pad_token_id": None}, layers_block_type=["linear_attention", "mlp", "full_attention"],
        head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=8,
    ),
    "kimi_linear": hf.KimiLinearConfig(
        **{**SIZES, "pad_token_id": None, "num_key_value_heads": 4, "num_hidden_layers": 2},
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense"] * 2,
        num_local_experts=2, moe_intermediate_size=32, linear_num_heads=4, linear_head_dim=16,
        kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    ),
}  # fmt: skip


def save_hybrid(folder: Path, name: str) -> Path:
    return save_text_model(folder, (CONFIGS | OTHERS)[name], seed=7)
