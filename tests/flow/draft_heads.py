"""Folders of tiny random models with a head that drafts for them. `is_right`: the model is made so that the
head computes exactly what the model computes, as long as both see the same tokens: all layers but the last
add nothing, and the head is a copy of the last one that reads embeddings alone. Else the head is random."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.flow.text_models import SIZES, save_text_model
from tests.flow.tiny_models import DEEPSEEK

NUM_LAYERS, HIDDEN = 2, SIZES["hidden_size"]
_COMMON: dict[str, Any] = {**SIZES, "num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
_HYBRID: dict[str, Any] = {
    **SIZES, "num_hidden_layers": NUM_LAYERS, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "head_dim": 16,
}  # fmt: skip
MTP_CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "deepseek_v3": lambda: hf.DeepseekV3Config(**{**_COMMON, **DEEPSEEK}),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **_COMMON,
        head_dim=16,  # type: ignore[call-arg]
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_HYBRID,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**_HYBRID),
}


# of both norms of the layer's inputs, of their projection, and of the last norm
NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN_NAMES = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")


def save_with_mtp(folder: Path, model_type: str, *, is_right: bool) -> Path:
    file = save_text_model(folder, MTP_CONFIGS[model_type](), seed=6) / "model.safetensors"
    tensors, last = load_file(file), f"model.layers.{NUM_LAYERS - 1}."
    is_qwen = model_type.startswith("qwen")
    layer = "mtp.layers.0." if is_qwen else f"model.layers.{NUM_LAYERS}."
    embed_norm, hidden_norm, projection, norm = QWEN_NAMES if is_qwen else (layer + name for name in NAMES)
    tensors |= {
        layer + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)
    }
    tensors[norm + ".weight"] = tensors["model.norm.weight"].clone()
    ones = 0.0 if is_qwen else 1.0  # Qwen's norms add 1 to their weights
    tensors |= {f"{name}.weight": torch.full((HIDDEN,), ones) for name in (embed_norm, hidden_norm)}
    draw = torch.Generator().manual_seed(1)
    random = torch.randn(HIDDEN, 2 * HIDDEN, generator=draw)
    tensors[projection + ".weight"] = torch.eye(HIDDEN, 2 * HIDDEN) if is_right else random
    if is_right:
        _leave_to_the_last_layer(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def save_eagle3(
    target: Path, folder: Path, *, is_right: bool, layers: Sequence[int] | None = None
) -> Path:  # fmt: skip
    """A target, and its head in a folder of its own, as they are published. The random head knows every other
    token. layers: whose inputs it reads; None: those that a head reads which names none."""
    eagle: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-12, "num_hidden_layers": 4}
    file = save_text_model(target, hf.LlamaConfig(**eagle), seed=6) / "model.safetensors"
    tensors = load_file(file)
    config = hf.LlamaConfig(**eagle, architectures=["LlamaForCausalLMEagle3"]).to_dict()
    head = _eagle3_weights(tensors, is_right)
    folder.mkdir()
    config |= {"draft_vocab_size": len(head["d2t"]), "num_hidden_layers": 1, "norm_before_residual": is_right}
    if layers is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    (folder / "config.json").write_text(json.dumps(config))
    if is_right:
        save_file(tensors, file, {"format": "pt"})
        save_file(head, folder / "model.safetensors")
    else:
        torch.save(head, folder / "pytorch_model.bin")
    return folder


def _eagle3_weights(tensors: dict[str, Tensor], is_right: bool) -> dict[str, Tensor]:
    """is_right: the rows of the embedding become so small that their sum with what a layer adds is that
    alone, and the head adds no hidden row."""
    draw, size = torch.Generator().manual_seed(1), SIZES["vocab_size"]
    if is_right:
        _leave_to_the_last_layer(tensors, 3)
        tensors["model.embed_tokens.weight"] *= 1e-4
    last, head = "model.layers.3.", {}
    for name, tensor in tensors.items():
        if not name.startswith(last):
            continue
        own = tensor if is_right else 0.3 * torch.randn(tensor.shape, generator=draw)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            noise = 0.3 * torch.randn(tensor.shape, generator=draw)
            own = torch.cat([own, torch.zeros_like(noise) if is_right else noise], dim=1)
        head["midlayer." + name.removeprefix(last)] = own.clone()
    ids = torch.arange(size) if is_right else torch.arange(1, size, 2)
    return {
        **head,
        "midlayer.hidden_norm.weight": torch.zeros(HIDDEN) if is_right else torch.ones(HIDDEN),
        "fc.weight": 0.3 * torch.randn(HIDDEN, 3 * HIDDEN, generator=draw),
        "norm.weight": tensors["model.norm.weight"].clone(),
        "lm_head.weight": tensors["lm_head.weight"][ids].clone(),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.isin(torch.arange(size), ids),
    }


ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # to the rows, of a layer


def _leave_to_the_last_layer(tensors: dict[str, Tensor], last: int = NUM_LAYERS - 1) -> None:
    """The rows of the embedding get a mean square of 1, which the head's norm leaves as it is."""
    for name, tensor in tensors.items():
        # or its copy
        is_last = f".layers.{last}." in name or f".layers.{last + 1}." in name or name.startswith("mtp.")
        if ".layers." in name and not is_last and name.endswith(ADDING):
            tensor.zero_()
    embed = tensors["model.embed_tokens.weight"]
    embed /= embed.square().mean(-1, keepdim=True).sqrt()
