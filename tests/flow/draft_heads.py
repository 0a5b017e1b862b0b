"""Folders of tiny random models with a head that drafts for them. `is_right`: the model is made so that the
head computes exactly what the model computes, as long as both see the same tokens: all layers but the last
add nothing, and the head is a copy of the last one that reads embeddings alone. Else the head is random."""

from __future__ import annotations

import json
from collections.abc import Callable
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
}


def save_with_mtp(folder: Path, model_type: str, *, is_right: bool) -> Path:
    file = save_text_model(folder, MTP_CONFIGS[model_type](), seed=6) / "model.safetensors"
    tensors = load_file(file)
    last, own = f"model.layers.{NUM_LAYERS - 1}.", f"model.layers.{NUM_LAYERS}."
    tensors |= {
        own + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)
    }
    tensors[own + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors |= {f"{own}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm")}
    if is_right:
        tensors[own + "eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)
        _leave_to_the_last_layer(tensors)
    else:
        draw = torch.Generator().manual_seed(1)
        tensors[own + "eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=draw)
    save_file(tensors, file, {"format": "pt"})
    return folder


def save_eagle3(target: Path, folder: Path, *, is_right: bool) -> Path:
    """A target, and its head in a folder of its own, as they are published. The random head knows every other
    token."""
    eagle: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-12, "num_hidden_layers": 4}
    file = save_text_model(target, hf.LlamaConfig(**eagle), seed=6) / "model.safetensors"
    tensors = load_file(file)
    config = hf.LlamaConfig(**eagle, architectures=["LlamaForCausalLMEagle3"]).to_dict()
    head = _eagle3_weights(tensors, is_right)
    folder.mkdir()
    config |= {"draft_vocab_size": len(head["d2t"]), "num_hidden_layers": 1, "norm_before_residual": is_right}
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


def _leave_to_the_last_layer(tensors: dict[str, Tensor], last: int = NUM_LAYERS - 1) -> None:
    """The rows of the embedding get a mean square of 1, which the head's norm leaves as it is."""
    for name, tensor in tensors.items():
        is_last = f".layers.{last}." in name or f".layers.{last + 1}." in name  # the latter: its copy
        if ".layers." in name and not is_last and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embed = tensors["model.embed_tokens.weight"]
    embed /= embed.square().mean(-1, keepdim=True).sqrt()
