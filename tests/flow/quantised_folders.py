"""Tiny checkpoints as exporters write them: quantised tensors, and beside them what they stand for, in
float32."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES

BLOCK = 16
FP8_ENTRY = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
MXFP4_ENTRY = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.router"]}
STATIC_ENTRY = {**FP8_ENTRY, "weight_block_size": None, "activation_scheme": "static"}
E4M3_MAX = 448.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
WHOLE = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni": "Qwen3OmniMoe"}


@dataclass
class Checkpoint:
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    model_class: type[hf.PreTrainedModel]
    other_files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def copied(self) -> Checkpoint:
        return Checkpoint(copy.deepcopy(self.config), dict(self.tensors), self.model_class)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {"config.json": self.config, **self.other_files}.items():
            (folder / name).write_text(json.dumps(content))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder


def plain(family: str, folder: Path) -> Checkpoint:
    """As transformers saves the family's tiny model. Writes the folder meanwhile."""
    model = (TEXT_FAMILIES.get(family) or MEDIA_FAMILIES[family])().model
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return Checkpoint(config, load_file(folder / "model.safetensors"), type(model))


def quantised(
    checkpoint: Checkpoint, matrix: Callable[[Tensor], Mapping[str, Tensor]], is_chosen: Callable[[str], bool]
) -> Checkpoint:
    """With `matrix` of each chosen weight in its place: what is added to the name, and the tensor."""
    changed = checkpoint.copied()
    for name in filter(is_chosen, checkpoint.tensors):
        tensor = changed.tensors.pop(name)
        changed.tensors |= {name + ending: part for ending, part in matrix(tensor).items()}
    return changed


def is_linear(name: str) -> bool:
    return name.endswith(("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")) and "patch" not in name


def is_expert(name: str) -> bool:
    """Of a layer's experts in one tensor."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def _transposed(checkpoint: Checkpoint) -> Checkpoint:
    """With experts as the hub has them in some families: [experts, in, out]."""
    turned = {
        name: tensor.transpose(1, 2) for name, tensor in checkpoint.tensors.items() if is_expert(name)
    }  # fmt: skip
    return Checkpoint(checkpoint.config, {**checkpoint.tensors, **turned}, checkpoint.model_class)


def with_entries(
    checkpoint: Checkpoint, *, columns_first: bool = False, alternates: bool = False
) -> Checkpoint:
    """With linears of each expert, as exporters of quantised weights have them. columns_first: experts are
    [experts, in, out]. alternates: gates and values do."""
    changed = checkpoint.copied()
    for stored, tensor in checkpoint.tensors.items():
        name = stored
        for of_aria, usual in (("fc1.weight", "gate_up_proj"), ("fc2.weight", "down_proj")):
            name = name.replace(f".experts.{of_aria}", f".experts.{usual}")
        if not re.search(r"\.experts\.(gate_up|down)_proj(_bias)?$", name):
            continue
        del changed.tensors[stored]
        path, _, leaf = name.rpartition(".")
        for number, expert in enumerate(tensor):
            kind = "bias" if leaf.endswith("_bias") else "weight"
            rows = expert.T if columns_first and kind == "weight" else expert
            half = len(rows) // 2
            gates, values = (rows[::2], rows[1::2]) if alternates else (rows[:half], rows[half:])
            parts = {"gate_proj": gates, "up_proj": values} if "gate_up" in leaf else {"down_proj": rows}
            for part, matrix in parts.items():
                changed.tensors[f"{path}.{number}.{part}.{kind}"] = matrix.contiguous()
    return changed


def _in_fused_fp8(block: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Of experts in one tensor, as it lies. block: rows and columns with one scale; 0: a matrix has one."""

    def matrix(weight: Tensor) -> dict[str, Tensor]:
        size = [-(-each // block) if block else 1 for each in weight.shape[1:]]
        scales = torch.zeros(len(weight), *size)
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(size[0]):
            for column in range(size[1]):
                rows, columns = (
                    slice(each * block, (each + 1) * block) if block else slice(None)
                    for each in (row, column)
                )
                part = weight[:, rows, columns]
                scales[:, row, column] = part.abs().amax((1, 2)) / E4M3_MAX
                part = part / scales[:, row, column, None, None]
                codes[:, rows, columns] = part.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return {"": codes, "_scale_inv": scales}

    return matrix


def _of_fused_fp8(checkpoint: Checkpoint, block: int) -> Checkpoint:
    """What `_in_fused_fp8` stands for, in float32."""
    tensors = dict(checkpoint.tensors)
    for name in filter(is_expert, checkpoint.tensors):
        codes, scales = tensors[name].float(), tensors.pop(f"{name}_scale_inv")
        for axis in (1, 2) if block else ():
            scales = scales.repeat_interleave(block, axis).narrow(axis, 0, codes.shape[axis])
        tensors[name] = codes * scales
    return Checkpoint(checkpoint.config, tensors, checkpoint.model_class)


def in_fp8_blocks(weight: Tensor) -> dict[str, Tensor]:
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / E4M3_MAX
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"": codes.reshape(weight.shape), "_scale_inv": scales}


def in_fp8(weight: Tensor) -> dict[str, Tensor]:
    """As modelopt does: one scale for a matrix."""
    scale = weight.abs().max() / E4M3_MAX
    return {
        "": (weight / scale).to(torch.float8_e4m3fn), "_scale": scale,
    }  # fmt: skip


def in_int8(weight: Tensor) -> dict[str, Tensor]:
    """As bitsandbytes does, but for the name of the scales (`SCB`)."""
    scales = weight.abs().amax(1)
    return {"": (weight / scales[:, None] * 127).round().to(torch.int8), "_SCB": scales}


def in_mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Of experts: [experts, in, out]."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    values = groups / exponents.exp2()[..., None]
    codes = (values.abs()[..., None] - E2M1).abs().argmin(-1).to(torch.uint8) | (values < 0) << 3
    codes = codes.to(torch.uint8)
    return {"_blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "_scales": (exponents + 127).to(torch.uint8)}


def dequantised(checkpoint: Checkpoint, block: tuple[int, int] = (BLOCK, BLOCK)) -> Checkpoint:
    """What fp8 in blocks and MXFP4 stand for, in float32. A weight without its scales is left as it is."""
    tensors = dict(checkpoint.tensors)
    for name in checkpoint.tensors:
        stem = name.removesuffix("_blocks")
        if f"{name}_scale_inv" in tensors:
            scales = tensors.pop(f"{name}_scale_inv").float()
            rows, columns = tensors[name].shape
            tensors[name] = tensors[name].float() * torch.kron(scales, torch.ones(block))[:rows, :columns]
        elif stem != name:
            packed, exponents = tensors.pop(name), tensors.pop(f"{stem}_scales").float() - 127
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
            values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * exponents.exp2()[..., None]
            tensors[stem] = values.flatten(-2).transpose(1, 2)
    floats = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    return Checkpoint(checkpoint.config, {**tensors, **floats}, checkpoint.model_class)


def whole_omni(part: Checkpoint, family: str) -> Checkpoint:
    """The checkpoint as a part of one that also speaks."""
    config = getattr(hf, f"{WHOLE[family]}Config")(thinker_config=part.config).to_dict()
    config["architectures"] = [f"{WHOLE[family]}ForConditionalGeneration"]
    tensors = {f"thinker.{name}": tensor for name, tensor in part.tensors.items()}
    return Checkpoint(config, {**tensors, "talker.weight": torch.zeros(1)}, part.model_class)


def part_of(config: dict[str, Any], path: str) -> dict[str, Any]:
    """`path`: keys with dots between; empty: the whole."""
    for key in filter(None, path.split(".")):
        config = config[key]
    return config


def fp8(checkpoint: Checkpoint) -> Checkpoint:
    """Without an entry."""
    return quantised(checkpoint, in_fp8_blocks, is_linear)


def declared(checkpoint: Checkpoint, entry: dict, path: str = "") -> Checkpoint:
    part_of(checkpoint.config, path)["quantization_config"] = entry
    return checkpoint


def fused_fp8(original: Checkpoint, block: int, *, is_hub: bool = False) -> tuple[Checkpoint, Checkpoint]:
    """block: 0: a matrix has one scale, and the layer's activations, too. is_hub: the file holds experts
    transposed; the plain checkpoint as the model does, because transformers does not turn square matrices."""
    stored = quantised(_transposed(original) if is_hub else original, _in_fused_fp8(block), is_expert)
    expected = _of_fused_fp8(stored, block).copied()
    expected = _transposed(expected) if is_hub else expected
    if not block:
        for name in filter(is_expert, original.tensors):
            stored.tensors[f"{name}_activation_scale"] = torch.full((len(original.tensors[name]),), 0.01)
    entry = {**FP8_ENTRY, "weight_block_size": [block, block]} if block else STATIC_ENTRY
    return declared(stored, entry), expected


def fuzzed(num_examples: int) -> Callable:
    """Settings of a test that changes a checkpoint in each of its examples."""
    return settings(
        max_examples=num_examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
