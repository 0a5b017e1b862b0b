"""Whether the weights of a model folder are plain numbers, or say how they become plain. No torch.

Two sides are judged independently. The *entry* is what the configuration declares: `quantization_config` at
the top or in any part of config.json, and hf_quant_config.json. The *headers* are what the weight files show:
tensors of 8 bits and less in place of a weight, and scales that stand next to one. What the entry does not
explain is refused by the tensor's name, and so is an entry that no tensor bears out: transformers would leave
out a scale that it does not know and compute with the rest.

Which formats there are is in `cluster.config.weight_formats`. All of them become plain weights while they are
read, which gives the very numbers that the format stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster.config.weight_formats import (
    KV_SCALES,
    PLAIN,
    Header,
    NotServed,
    Quantisation,
    StoredWeight,
    Unexplained,
    read_entry,
)
from cluster.errors import ConfigError

SERVED = "the unquantised checkpoint (weights of 16 or 32 bits), or a format that is served (docs/workers.md)"

_ENTRIES = ("quantization_config", "compression_config")  # the second: of older compressed-tensors
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


def declared(folder: Path, config: Mapping[str, Any], part_key: str | None) -> Quantisation | None:
    """What the configuration says, without a look at the weights. `config`: all of config.json. `part_key`:
    of the part that is served; None: it is the whole. Raises ConfigError for a format that is not served."""
    entry = _nearest_entry(folder, config, part_key)
    return None if entry is None else _served(folder, entry, config)


def judge(
    folder: Path, config: Mapping[str, Any], part_key: str | None, headers: Mapping[str, Header]
) -> Quantisation | None:
    """`declared`, with the tensors that it explains; None: the weights are plain. `headers`: of all tensors
    of the checkpoint. Raises ConfigError for weights that would be loaded wrong."""
    entry = _nearest_entry(folder, config, part_key)
    headers = _of_part(headers, config, part_key)
    found = [name for name, header in headers.items() if _is_quantised(name, header, headers)]
    found.sort(key=lambda name: headers[name].dtype in PLAIN)  # codes first: they say more than scales
    quantised = {name: headers[name] for name in found}
    first = next(iter(quantised), None)
    if entry is None:
        if first is None:
            return None
        reason = "an adapter has added" if _ADAPTER_NAME.search(first) else "no quantization_config explains"
        what = f"tensor {first} ({headers[first].dtype}), which {reason}"
        raise ConfigError(_refusal(folder, what), param="model")
    quantisation = _served(folder, entry, config, "" if first is None else f" (tensor {first})")
    if not quantised:
        raise ConfigError(
            f"{folder}: {entry.where} declares {quantisation}, but no tensor is quantised: if the weights "
            "are plain, delete the entry; else use the unquantised checkpoint",
            param="model",
        )
    return _with_weights(folder, quantisation, quantised, headers)


def _served(folder: Path, entry: _Declaration, config: Mapping[str, Any], tensor: str = "") -> Quantisation:
    """Raises ConfigError. `tensor`: of this format, for the message."""
    read = entry.read(config)
    if isinstance(read, NotServed):
        what = " ".join(filter(None, (f"weights quantised as {entry}{tensor}", str(read))))
        raise ConfigError(_refusal(folder, what), param="model")
    return read


class _Declaration(NamedTuple):
    where: str
    content: Mapping[str, Any]

    @property
    def method(self) -> str:
        """Empty: the entry says nothing about weights."""
        if self.content.get("load_in_4bit") or self.content.get("load_in_8bit"):
            return "bitsandbytes"
        return str(self.content.get("quant_method") or "")

    def read(self, config: Mapping[str, Any]) -> Quantisation | NotServed:
        """What the entry declares, or why that is not served."""
        try:
            return read_entry(self.method, self.content, config.get("model_type"))
        except NotServed as reason:
            return reason

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
    by_meaning = {}
    for entry in _entries(part, path, outer):
        read = entry.read(config)
        by_meaning[entry.method, str(read) if isinstance(read, NotServed) else read] = entry
    if len(by_meaning) > 1:
        all_of_them = " and ".join(map(str, by_meaning.values()))
        raise ConfigError(_refusal(folder, f"weights quantised as {all_of_them}"), param="model")
    return next(iter(by_meaning.values()), None)


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
    if header.dtype in PLAIN:
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


def _with_weights(
    folder: Path, quantisation: Quantisation, quantised: Mapping[str, Header], headers: Mapping[str, Header]
) -> Quantisation:
    """Raises ConfigError for a tensor that the format does not explain."""
    layout = quantisation.layout
    weights: dict[str, StoredWeight] = {}
    unused = {name for name in headers if name.rpartition(".")[2] in KV_SCALES}
    ends = () if layout.fused is None else (layout.fused.scales, *layout.fused.unused)
    orphans = {
        name: header
        for name, header in headers.items()
        if name.endswith(layout.scales) or (name.endswith(ends) and layout.find(name))
    }
    for name, header in {**quantised, **orphans}.items():
        try:
            if (found := layout.find(name)) is None:
                raise Unexplained(f"only {layout} are known")
            own, stem = found
            plain, weights[plain] = quantisation.stored(stem, headers, own)
        except Unexplained as error:
            what = (
                f"tensor {name} ({header.dtype} {list(header.shape)}), which is not {quantisation}: {error}"
            )
            raise ConfigError(_refusal(folder, what), param="model") from error
        if name.endswith(own.unused):
            unused.add(name)
    return replace(quantisation, weights=weights, unused=frozenset(unused))


def _refusal(folder: Path, what: str) -> str:
    return f"{folder} has {what}; that is not served: use {SERVED}"
