"""Whether the weights of a model folder are plain numbers, or say how they become plain. No torch.

Two sides are judged independently. The *entry* is what the configuration declares: `quantization_config` at
the top or in any part of config.json, and hf_quant_config.json. The *headers* are what the weight files show:
tensors of 8 bits and less in place of a weight, and scales that stand next to one. What the entry does not
explain is refused by the tensor's name, and so is an entry that no tensor bears out: transformers would leave
out a scale that it does not know and compute with the rest.

Two formats are served. Both become plain weights while they are read, which gives the very numbers that the
format stands for: fp8 in blocks, and the MXFP4 experts of gpt_oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import ConfigError

FP8, MXFP4 = "fp8", "mxfp4"
SERVED = "the unquantised checkpoint (weights of 16 or 32 bits), one in fp8 blocks, or gpt_oss in MXFP4"
MXFP4_GROUP = 32  # weights of one scale, two in a byte

_ENTRIES = ("quantization_config", "compression_config")  # the second: of older compressed-tensors
_PLAIN = ("F64", "F32", "F16", "BF16")
_FP8_SCALE = ".weight_scale_inv"
# Ids, indices and masks, unless they bear the name of a weight. Any other dtype holds codes.
_INDICES = ("BOOL", "I32", "I64", "U64")
_WEIGHT_NAME = re.compile(r"(.*_)?(weight|bias|proj)")
_PACKED_NAME = re.compile(
    r"q(weight|zeros)|g_idx|.*_packed|.*weight_(g_idx|shape|zero_point|global_scale)"
    r"|.*weight_scales?(_\w+)?|.*scale_inv|_scale|qscale_\w+|input_(global_scale|zero_point)"
    r"|SCB|W_q|(nested_)?(absmax|quant_map)|quant_state.*"
)
_BESIDE_WEIGHT = (
    "scale", "scales", "zero", "zeros", "zero_point", "biases", "activation_scale", "input_scale",
    "output_scale", "pre_quant_scale",
)  # fmt: skip
_SCALE_OF = re.compile(r"(.+?)_(scales?|scale_2|zero_point|zeros)")
_ADAPTER_NAME = re.compile(r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer)(\.|$)")


class Header(NamedTuple):
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Quantisation:
    """A format that is served."""

    method: str  # FP8 or MXFP4
    entry: Mapping[str, Any]  # as the configuration has it
    block: tuple[int, int] = (1, MXFP4_GROUP)  # rows and columns of a weight that have one scale
    scales: Mapping[str, str] = field(default_factory=dict)  # quantised tensor: its scales
    grids: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # shape of scales: a tensor with them

    def __str__(self) -> str:
        return "MXFP4" if self.method == MXFP4 else f"fp8 in blocks of {self.block[0]} × {self.block[1]}"

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError if a rank's share could begin inside of a block: transformers slices weights and
        scales each by their own size."""
        if self.method == FP8 and num_ranks > 1:
            for grid, name in self.grids.items():
                if any(size % num_ranks for size in grid):
                    raise ConfigError(
                        f"{name} has {grid[0]} × {grid[1]} {self}, which cannot be distributed evenly to "
                        f"{num_ranks} ranks: take fewer, or the unquantised checkpoint",
                        param="tensor_parallel_size",
                    )


def declared(folder: Path, config: Mapping[str, Any], part_key: str | None) -> Quantisation | None:
    """What the configuration says, without a look at the weights. `config`: all of config.json. `part_key`:
    of the part that is served; None: it is the whole. Raises ConfigError for a format that is not served."""
    entry = _nearest_entry(folder, config, part_key)
    if entry is None:
        return None
    if (quantisation := entry.served(config)) is None:
        raise ConfigError(_refusal(folder, f"weights quantised as {entry}"), param="model")
    return quantisation


def judge(
    folder: Path, config: Mapping[str, Any], part_key: str | None, headers: Mapping[str, Header]
) -> Quantisation | None:
    """`declared`, with the tensors that it explains; None: the weights are plain. `headers`: of all tensors
    of the checkpoint. Raises ConfigError for weights that would be loaded wrong."""
    entry = _nearest_entry(folder, config, part_key)
    headers = _of_part(headers, config, part_key)
    found = [name for name, header in headers.items() if _is_quantised(name, header, headers)]
    found.sort(key=lambda name: headers[name].dtype in _PLAIN)  # codes first: they say more than scales
    quantised = {name: headers[name] for name in found}
    first = next(iter(quantised), None)
    if entry is None:
        if first is None:
            return None
        reason = "an adapter has added" if _ADAPTER_NAME.search(first) else "no quantization_config explains"
        what = f"tensor {first} ({headers[first].dtype}), which {reason}"
        raise ConfigError(_refusal(folder, what), param="model")
    if (quantisation := entry.served(config)) is None:
        tensor = "" if first is None else f" (tensor {first})"
        raise ConfigError(_refusal(folder, f"weights quantised as {entry}{tensor}"), param="model")
    if not quantised:
        raise ConfigError(
            f"{folder}: {entry.where} declares {quantisation}, but no tensor is quantised: if the weights "
            "are plain, delete the entry; else use the unquantised checkpoint",
            param="model",
        )
    return _with_scales(folder, quantisation, quantised, headers)


class _Declaration(NamedTuple):
    where: str
    content: Mapping[str, Any]

    @property
    def method(self) -> str:
        """Empty: the entry says nothing about weights."""
        if self.content.get("load_in_4bit") or self.content.get("load_in_8bit"):
            return "bitsandbytes"
        return str(self.content.get("quant_method") or "")

    @property
    def form(self) -> tuple[object, ...]:
        """What two entries for one checkpoint must agree in."""
        block = self.content.get("weight_block_size", (128, 128))
        return self.method, tuple(block) if isinstance(block, list | tuple) else block

    def served(self, config: Mapping[str, Any]) -> Quantisation | None:
        method, block = self.form
        if method == MXFP4:
            return Quantisation(MXFP4, self.content) if config.get("model_type") == "gpt_oss" else None
        is_dynamic = self.content.get("activation_scheme", "dynamic") == "dynamic"
        if method != FP8 or not is_dynamic or not isinstance(block, tuple) or len(block) != 2:
            return None
        if not all(type(size) is int and size > 0 for size in block):
            return None
        return Quantisation(FP8, self.content, block)

    def __str__(self) -> str:
        details = (
            self.content.get("quant_algo"), self.content.get("format"), self.content.get("activation_scheme"),
            f"{bits} bit" if (bits := self.content.get("bits")) else None,
            "4 bit" if self.content.get("load_in_4bit") else None,
        )  # fmt: skip
        return " ".join((self.method, *(str(detail) for detail in details if detail))) + f" in {self.where}"


def _nearest_entry(folder: Path, config: Mapping[str, Any], part_key: str | None) -> _Declaration | None:
    """The entry nearest to each part's weights; of a whole checkpoint those of the part that is served."""
    outer = _own_entry(config, "config.json") or _older_export(folder)
    part, path = config, "config.json"
    if part_key is not None:
        part, path = config.get(part_key) or {}, part_key
        outer = _own_entry(part, path) or outer
    by_form = {entry.form: entry for entry in _entries(part, path, outer)}
    if len(by_form) > 1:
        both = " and ".join(str(entry) for entry in by_form.values())
        raise ConfigError(_refusal(folder, f"weights quantised as {both}"), param="model")
    return next(iter(by_form.values()), None)


def _entries(part: Mapping[str, Any], path: str, nearest: _Declaration | None) -> Iterator[_Declaration]:
    if nearest is not None:
        yield nearest
    for key, value in part.items():
        if key.endswith("_config") and key not in _ENTRIES and isinstance(value, dict):
            yield from _entries(value, key, _own_entry(value, key) or nearest)


def _own_entry(part: Mapping[str, Any], path: str) -> _Declaration | None:
    for key in _ENTRIES:
        if isinstance(content := part.get(key), dict) and (entry := _Declaration(path, content)).method:
            return entry
    return None


def _older_export(folder: Path) -> _Declaration | None:
    """modelopt wrote a file of its own."""
    file = folder / "hf_quant_config.json"
    try:
        content = json.loads(file.read_text())
        quantisation = content.get("quantization") or {}
        algorithm = quantisation.get("quant_algo")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param="model") from error
    return (
        _Declaration(file.name, {"quant_method": "modelopt", "quant_algo": algorithm}) if algorithm else None
    )


def _of_part(
    headers: Mapping[str, Header], config: Mapping[str, Any], part_key: str | None
) -> Mapping[str, Header]:
    """The headers without the tensors of parts that are not served."""
    if part_key is None:
        return headers
    others = (key.removesuffix("_config") for key in config if key.endswith("_config") and key != part_key)
    prefixes = tuple(f"{other}." for other in others)
    return {name: header for name, header in headers.items() if not name.startswith(prefixes)}


def _is_quantised(name: str, header: Header, headers: Mapping[str, Header]) -> bool:
    """Whether this tensor is less than a weight, or makes another one more than it looks. Decided by what it
    stands next to: `logit_scale`, layer scales, KV scales and masks do not belong to a weight."""
    path, dot, leaf = name.rpartition(".")
    path += dot
    if _ADAPTER_NAME.search(name) or _PACKED_NAME.fullmatch(leaf):
        return True
    if header.dtype in _PLAIN:
        if leaf in _BESIDE_WEIGHT:
            return f"{path}weight" in headers
        scaled = _SCALE_OF.fullmatch(leaf)
        return scaled is not None and any(
            f"{path}{weight}" in headers for weight in (scaled[1], f"{scaled[1]}.weight")
        )
    if header.dtype in _INDICES:
        return bool(_WEIGHT_NAME.fullmatch(leaf)) and not _is_mask(leaf, header)
    return not _is_mask(leaf, header)


def _is_mask(leaf: str, header: Header) -> bool:
    """GPT-2 and its kin keep a causal mask as a buffer that is named bias."""
    if header.dtype not in ("BOOL", "U8"):
        return False
    return "mask" in leaf or (leaf == "bias" and len(header.shape) == 4)


def _with_scales(
    folder: Path, quantisation: Quantisation, quantised: Mapping[str, Header], headers: Mapping[str, Header]
) -> Quantisation:
    """Raises ConfigError for a tensor that the format does not explain."""
    explain = _explain_mxfp4 if quantisation.method == MXFP4 else _explain_fp8
    scales: dict[str, str] = {}
    for name, header in quantised.items():
        weight, scale, wrong = explain(name, headers, quantisation)
        if wrong:
            what = (
                f"tensor {name} ({header.dtype} {list(header.shape)}), which is not {quantisation}: {wrong}"
            )
            raise ConfigError(_refusal(folder, what), param="model")
        scales[weight] = scale
    return replace(quantisation, scales=scales, grids={headers[s].shape: w for w, s in scales.items()})


def _explain_fp8(
    name: str, headers: Mapping[str, Header], quantisation: Quantisation
) -> tuple[str, str, str]:
    """The weight, its scales, and what is wrong with them."""
    stem = name.removesuffix(_FP8_SCALE).removesuffix(".weight")
    weight, scale = f"{stem}.weight", f"{stem}{_FP8_SCALE}"
    if name not in (weight, scale):
        return weight, scale, f"only .weight and {_FP8_SCALE} are known"
    if weight not in headers or scale not in headers:
        return weight, scale, f"{scale if weight in headers else weight} is missing"
    (dtype, shape), (scale_dtype, grid) = headers[weight], headers[scale]
    if dtype != "F8_E4M3" or scale_dtype not in _PLAIN:
        return weight, scale, f"the weight is {dtype}, the scale {scale_dtype}"
    if len(grid) != 2 or tuple(n * b for n, b in zip(grid, quantisation.block, strict=True)) != shape:
        return weight, scale, f"a weight {list(shape)} with scales {list(grid)} is not cut evenly"
    return weight, scale, ""


def _explain_mxfp4(
    name: str, headers: Mapping[str, Header], _quantisation: Quantisation
) -> tuple[str, str, str]:
    stem = name.removesuffix("_blocks").removesuffix("_scales")
    blocks, scales = f"{stem}_blocks", f"{stem}_scales"
    if name not in (blocks, scales) or not stem.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return blocks, scales, "only blocks and scales of experts are known"
    if blocks not in headers or scales not in headers:
        return blocks, scales, f"{scales if blocks in headers else blocks} is missing"
    (dtype, shape), (scale_dtype, grid) = headers[blocks], headers[scales]
    if dtype != "U8" or scale_dtype != "U8":
        return blocks, scales, f"the blocks are {dtype}, the scales {scale_dtype}"
    if len(grid) != 3 or shape != (*grid, MXFP4_GROUP // 2):
        return blocks, scales, f"blocks {list(shape)} do not fit scales {list(grid)}"
    return blocks, scales, ""


def _refusal(folder: Path, what: str) -> str:
    return f"{folder} has {what}; that is not served: use {SERVED}"
