"""Reads quantised weights as the plain numbers that they stand for, with transformers' own conversions.

    declare(config, quantisation)       the one entry that transformers sees
    check_scales(files, quantisation)   before a weight is converted
    settle(model, quantisation, dtype)  after that: every parameter in one dtype

Which formats there are, and whether a checkpoint has just the tensors of its format, is decided in
`cluster.config.quantised`. Runs on the thread that loads the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.config.quantised import MXFP4, Header, Quantisation
from cluster.errors import ConfigError

# The median of a matrix is about 0.01. Scales that were meant to divide make it 10⁵. There is no lower bound:
# experts that training never used decay to almost nothing.
_LARGEST_MEDIAN = 1.0
_NUM_ROWS = 8  # of each matrix that are looked at
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # magnitudes of MXFP4's codes; the fourth bit is the sign
_PLAIN_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
}  # fmt: skip
_MXFP4_BIAS = 127  # of exponents


def read_pickled_headers(folder: Path) -> dict[str, Header]:
    """The headers of all tensors of a checkpoint without safetensors. Raises ConfigError for a file that is
    no plain state dict."""
    headers = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            tensors = torch.load(file, map_location="meta", weights_only=True)
            headers |= {
                name: Header(_PLAIN_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
                for name, tensor in tensors.items()
            }
        except Exception as error:  # of the unpickler, which reads what the file says
            raise ConfigError(f"cannot read {file}: {error}", param="model") from error
    return headers


def declare(config: PreTrainedConfig, quantisation: Quantisation | None) -> None:
    """Replaces all entries in the configuration by one that makes transformers dequantise on every device. It
    goes by the tensors' names, so a list of modules that were left plain is of no use to it, and without one
    it would look for an output head that half a model has not."""
    for part in _parts(config):
        part.__dict__.pop("quantization_config", None)
    if quantisation is not None:
        config.quantization_config = {
            "quant_method": quantisation.method, "dequantize": True, "modules_to_not_convert": [],
        }  # fmt: skip


def settle(model: PreTrainedModel, quantisation: Quantisation, dtype: torch.dtype) -> None:
    """Casts what transformers leaves in the file's dtype: all plain tensors of a checkpoint with quantised
    ones. Notes the format in the model's configuration, and with that in its fingerprint: weights that were
    dequantised are not those that were quantised."""
    kept = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        wanted = next((kept[part] for part in kept if re.search(part, name)), dtype)
        if parameter.itemsize == 1:
            raise ConfigError(f"{name} was not dequantised ({quantisation})", param="model")
        if parameter.dtype is not wanted:
            parameter.data = parameter.data.to(wanted)
    model.config.dequantised_from = dict(quantisation.entry)


def check_scales(files: Sequence[Path], quantisation: Quantisation) -> None:
    """Raises ConfigError for a tensor whose scales make no plausible weights, e.g. if they were inverted.
    Reads a few rows of each matrix."""
    with ExitStack() as opened:
        tensors = {}
        for file in files:
            reader = opened.enter_context(safe_open(file, framework="pt"))
            tensors |= dict.fromkeys(reader.keys(), reader)
        for weight, scale in quantisation.scales.items():
            rows = tensors[weight].get_slice(weight)
            scales = tensors[scale].get_slice(scale)
            magnitudes = _mxfp4(rows, scales) if quantisation.method == MXFP4 else _fp8(rows, scales)
            magnitudes = magnitudes[magnitudes != 0]
            if magnitudes.numel() and not 0 < (median := float(magnitudes.median())) <= _LARGEST_MEDIAN:
                raise ConfigError(
                    f"{weight} × {scale} gives weights of about {median:.1e}: the scales are wrong, or "
                    "inverted; use another export or the unquantised checkpoint",
                    param="model",
                )


def _fp8(rows: Tensor, scales: Tensor) -> Tensor:
    """Magnitudes of the first rows. Negative if a scale is. Both arguments are read when they are sliced."""
    magnitudes, row_scales = rows[:_NUM_ROWS].float().abs(), scales[:1].float()
    return (magnitudes.unflatten(1, (row_scales.shape[1], -1)) * row_scales.unsqueeze(-1)).flatten()


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Magnitudes of the first rows of all experts, without their signs."""
    packed, exponents = blocks[:, :_NUM_ROWS], scales[:, :_NUM_ROWS].float() - _MXFP4_BIAS
    codes = torch.cat((packed & 7, packed >> 4 & 7), -1).long()
    return (_E2M1[codes] * exponents.exp2().unsqueeze(-1)).flatten()


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)
