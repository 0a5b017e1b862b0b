"""Tiny LoRA adapters, made by PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.flow.test_families import generate
from tests.flow.tiny_models import TinyCase, TinyRequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_b_proj")
MIXERS = ("in_proj", "in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z", "out_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
# By name; each differs from the others in rank, scaling and modules.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "targets": ATTENTION + MLP},
    "attention": {"r": 3, "lora_alpha": 12, "use_rslora": True, "targets": ("q_proj", "v_proj", "qkv_proj")},
    "mlp": {
        "r": 16, "lora_alpha": 16, "targets": MLP, "layers_to_transform": [1],
        "alpha_pattern": {"down_proj": 64}, "rank_pattern": {"down_proj": 2},
    },
}  # fmt: skip


def targets_in(model: PreTrainedModel, text_module: str | None, targets: tuple[str, ...]) -> list[str]:
    """Linears of the text model with these names; without experts."""
    base: Any = model.model
    prefix = "model." if text_module is None else f"model.{text_module}."
    text = base if text_module is None else getattr(base, text_module)
    if any("expert" in name for name, _ in text.named_modules()):
        targets = tuple(name for name in targets if name not in MLP)  # PEFT would adapt experts, too
    return [
        prefix + name
        for name, module in text.named_modules()
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear) and "expert" not in name
    ]


def save_adapter(
    model: PreTrainedModel, folder: Path, text_module: str | None = None, seed: int = 0, **options: Any
) -> Path:
    """An adapter of random weights. options: of `LoraConfig`, and `targets`."""
    torch.manual_seed(seed)
    chosen = targets_in(model, text_module, options.pop("targets"))
    layers = options.pop("layers_to_transform", None)
    if layers is not None:
        chosen = [name for name in chosen if any(f".{layer}." in name for layer in layers)]
    if not chosen:  # its MLPs are experts
        chosen = targets_in(model, text_module, ATTENTION + LATENT)
        options = {"r": options["r"], "lora_alpha": options["lora_alpha"]}
    config = LoraConfig(target_modules=chosen, init_lora_weights=False, **options)
    adapted: Any = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # strong enough to change greedy tokens
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    adapted.unload()
    return folder


def answers_of(case: TinyCase, folder: Path) -> list[list[int]]:
    """What PEFT's own model generates with the adapter, for each request."""
    adapted: Any = PeftModel.from_pretrained(case.model, folder)
    try:
        return [generate(TinyCase(adapted.eval(), []), request) for request in case.requests]
    finally:
        adapted.unload()


def adapters_of(
    case: TinyCase, folder: Path, text_module: str | None,
    adapters: Mapping[str, Mapping[str, Any]] = ADAPTERS,
) -> tuple[dict[str, str], dict[str, list[list[int]]]]:  # fmt: skip
    """Folders and answers by name."""
    folders: dict[str, str] = {}
    answers: dict[str, list[list[int]]] = {}
    for seed, (name, options) in enumerate(adapters.items()):
        path = save_adapter(case.model, folder / name, text_module, seed, **options)
        folders[name], answers[name] = str(path), answers_of(case, path)
    return folders, answers


__all__ = ["ADAPTERS", "TinyRequest", "adapters_of", "answers_of", "save_adapter"]
