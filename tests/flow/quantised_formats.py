"""Matrices in every format that is served, made by hand from its specification: integer codes first, then the
words that hold them, and beside them the weight that they stand for, in float32.

Nothing here is the product's: words are sums of shifted codes, and a code's scale is found by repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.flow.quantised_folders import E2M1, E4M3_MAX, Checkpoint

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns that stand in a word's nibbles, the lowest first
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    entry: dict[str, Any]
    # of [rows, columns] float32: what is added to the module's name, with its tensor; and the plain weight
    matrix: Callable[[Tensor], tuple[Parts, Tensor]]


def in_form(
    checkpoint: Checkpoint, form: Form, is_chosen: Callable[[str], bool]
) -> tuple[Checkpoint, Checkpoint]:
    """The checkpoint with every chosen weight in this format, declared at the top, and the plain one that it
    stands for."""
    stored, expected = checkpoint.copied(), checkpoint.copied()
    stored.config["quantization_config"] = form.entry
    for name in filter(is_chosen, checkpoint.tensors):
        parts, expected.tensors[name] = form.matrix(stored.tensors.pop(name).float())
        stored.tensors |= {name.removesuffix(".weight") + part: tensor for part, tensor in parts.items()}
    return stored, expected


def in_words(codes: Tensor, bits: int, axis: int, order: Sequence[int] | None = None) -> Tensor:
    """int32; the last word is filled with zeros. order: which of its codes stand in a word, the lowest bits
    first."""
    codes = codes.long().movedim(axis, -1)
    order = order or range(32 // bits)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % len(order)))
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // len(order), dtype=torch.int64)
    for place, which in enumerate(order):
        words += codes[..., which :: len(order)] << bits * place
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, axis)


def repeated(grid: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """[rows of blocks, columns of blocks] as one number for each weight."""
    return grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def in_integers(
    weight: Tensor, bits: int, group: int, dtype: torch.dtype, *, is_symmetric: bool, least_zero: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [rows, columns], zeros and scales [rows, groups], and the plain weight."""
    largest = (1 << bits) - 1
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if is_symmetric:
        scales = (groups.abs().amax(-1) / (largest // 2)).to(dtype)
        zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.int64)
    else:
        scales = ((high - low) / largest).to(dtype)
        zeros = (-low / scales.float()).round().long().clamp(least_zero, largest)
    every_scale = repeated(scales.float(), 1, group, weight.shape)
    every_zero = repeated(zeros, 1, group, weight.shape)
    codes = ((weight / every_scale).round().long() + every_zero).clamp(0, largest)
    return codes, zeros, scales, (codes - every_zero).float() * every_scale


def compressed_integers(bits: int, group: int | None, *, is_symmetric: bool = True) -> Form:
    """Of compressed-tensors (`pack-quantized`)."""

    def matrix(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, zeros, scales, plain = in_integers(
            weight, bits, group or weight.shape[1], torch.bfloat16, is_symmetric=is_symmetric
        )
        parts = {
            ".weight_packed": in_words(codes, bits, 1), ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        return parts if is_symmetric else {**parts, ".weight_zero_point": in_words(zeros, bits, 0)}, plain

    weights = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric, "group_size": group,
        "strategy": "group" if group else "channel", "actorder": None, "dynamic": False,
    }  # fmt: skip
    return Form(compressed_entry("pack-quantized", weights), matrix)


def compressed_entry(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*visual.*"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def awq(group: int) -> Form:
    def matrix(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, zeros, scales, plain = in_integers(weight, 4, group, torch.float16, is_symmetric=False)
        return {
            ".qweight": in_words(codes.T, 4, 1, AWQ_ORDER), ".qzeros": in_words(zeros.T, 4, 1, AWQ_ORDER),
            ".scales": scales.T,
        }, plain  # fmt: skip

    entry = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Form({**entry, "modules_to_not_convert": ["visual"]}, matrix)


def gptq(bits: int, group: int, *, is_symmetric: bool, version: int = 1) -> Form:
    def matrix(weight: Tensor) -> tuple[Parts, Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        codes, zeros, scales, plain = in_integers(
            weight, bits, size, torch.float16, is_symmetric=is_symmetric, least_zero=2 - version
        )
        return {
            ".qweight": in_words(codes.T, bits, 0), ".qzeros": in_words(zeros.T - 2 + version, bits, 1),
            ".scales": scales.T, ".g_idx": (torch.arange(columns) // size).int(),
        }, plain  # fmt: skip

    return Form(
        {
            "quant_method": "gptq", "bits": bits, "group_size": group, "sym": is_symmetric, "desc_act": False,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        },
        matrix,
    )  # fmt: skip


def fp8(
    entry: dict[str, Any], scale: str, block: tuple[int, int], shape: tuple[int, ...] = (-1,),
    dtype: torch.dtype = torch.float32, activations: str = "",
) -> Form:  # fmt: skip
    """block: rows and columns with one scale; 0: all. shape: of the scales; -1: as many as there are.
    activations: what follows the module's name in that of their scale."""

    def matrix(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
        grid = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for row in range(grid.shape[0]):
            for column in range(grid.shape[1]):
                part = weight[row * rows :, column * columns :][:rows, :columns]
                grid[row, column] = part.abs().max() / E4M3_MAX
        scales = grid.to(dtype)
        every_scale = repeated(scales.float(), rows, columns, weight.shape)
        codes = (weight / every_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        parts = {".weight": codes, scale: scales if shape == (0, 0) else scales.reshape(shape)}
        more = {activations: torch.tensor(0.01)} if activations else {}
        return {**parts, **more}, codes.float() * every_scale

    return Form(entry, matrix)


def fp4(
    entry: dict[str, Any], group: int, scale_of: Callable[[Tensor], tuple[Parts, Tensor]], codes: str
) -> Form:
    """Floats of 4 bits. scale_of: of the largest scale that each group may have [rows, groups], the tensors
    of scales and the numbers that they stand for."""

    def matrix(weight: Tensor) -> tuple[Parts, Tensor]:
        parts, scales = scale_of(weight.unflatten(1, (-1, group)).abs().amax(-1) / E2M1[-1])
        every_scale = repeated(scales, 1, group, weight.shape)
        places = ((weight / every_scale).abs()[..., None] - E2M1).abs().argmin(-1)
        numbers = (places + 8 * (weight < 0)).to(torch.uint8)
        signs = torch.where(weight < 0, -1.0, 1.0)
        return {**parts, codes: numbers[:, 0::2] + 16 * numbers[:, 1::2]}, E2M1[places] * signs * every_scale

    return Form(entry, matrix)


def e4m3_scales(factor: str, activations: str, *, divides: bool) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    """Of NVFP4: times a scale of the whole matrix, or divided by it."""

    def scale_of(least: Tensor) -> tuple[Parts, Tensor]:
        largest = least.max() / E4M3_MAX
        stored = torch.tensor([1 / largest]) if divides else largest
        codes = ((least * stored) if divides else (least / stored)).to(torch.float8_e4m3fn)
        numbers = codes.float() / stored if divides else codes.float() * stored
        return {".weight_scale": codes, factor: stored, activations: torch.tensor(0.01)}, numbers

    return scale_of


def exponents(least: Tensor) -> tuple[Parts, Tensor]:
    """Of MXFP4."""
    powers = least.log2().ceil()
    return {".weight_scale": (powers + 127).to(torch.uint8)}, powers.exp2()


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_FLOAT_4 = {**_FLOAT, "num_bits": 4}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
FORMS = {
    "fp8 in blocks that are not filled": fp8(_BLOCKS, ".weight_scale_inv", (24, 40), (0, 0)),
    "fp8 with static scales": fp8(
        _STATIC, ".weight_scale_inv", (0, 0), (), torch.bfloat16, ".activation_scale"
    ),
    "compressed fp8 by rows": fp8(
        compressed_entry("float-quantized", {**_FLOAT, "strategy": "channel"}), ".weight_scale", (1, 0),
        (-1, 1), torch.bfloat16,
    ),
    "compressed fp8, static": fp8(
        compressed_entry("float-quantized", {**_FLOAT, "strategy": "tensor"}), ".weight_scale", (0, 0), (1,),
        activations=".input_scale",
    ),
    "compressed fp8 in blocks": fp8(
        compressed_entry("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [16, 32]}),
        ".weight_scale", (16, 32), (0, 0),
    ),
    "modelopt fp8": fp8(
        {**_MODELOPT, "quant_algo": "FP8"}, ".weight_scale", (0, 0), (), activations=".input_scale"
    ),
    "modelopt fp8 by rows": fp8(
        {**_MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, ".weight_scale", (1, 0)
    ),
    "NVFP4": fp4(
        {**_MODELOPT, "quant_algo": "NVFP4"}, 16,
        e4m3_scales(".weight_scale_2", ".input_scale", divides=False), ".weight",
    ),
    "compressed NVFP4": fp4(
        compressed_entry("nvfp4-pack-quantized", {**_FLOAT_4, "strategy": "tensor_group", "group_size": 16}),
        16, e4m3_scales(".weight_global_scale", ".input_global_scale", divides=True), ".weight_packed",
    ),
    "compressed MXFP4": fp4(
        compressed_entry("mxfp4-pack-quantized", {**_FLOAT_4, "strategy": "group", "group_size": 32}),
        32, exponents, ".weight_packed",
    ),
    "W4A16": compressed_integers(4, GROUP),
    "W4A16 by rows": compressed_integers(4, None),
    "W4A16 with zeros": compressed_integers(4, GROUP, is_symmetric=False),
    "W4A16 by rows with zeros": compressed_integers(4, None, is_symmetric=False),
    "W8A16": compressed_integers(8, GROUP),
    "AWQ": awq(GROUP),
    "GPTQ": gptq(4, GROUP, is_symmetric=True),
    "GPTQ without groups": gptq(4, -1, is_symmetric=True),
    "GPTQ with zeros": gptq(4, GROUP, is_symmetric=False),
    "GPTQ of 8 bits": gptq(8, GROUP, is_symmetric=True),
    "GPTQ v2 with zeros": gptq(4, GROUP, is_symmetric=False, version=2),
}  # fmt: skip
