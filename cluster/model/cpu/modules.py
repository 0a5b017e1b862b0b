"""Modules that run the native kernels in place of a model's own modules, and `optimise`, which puts them
there.

Weights are packed once and kept in that form only. A replacement is compared with its module on random input
before it takes its place. A module that differs, or is not recognised, stays. float32 and bfloat16 are
lossless: the same products, summed in another order. INT8 weights are an option and not lossless. The result
of a row does not depend on the other rows of the batch.

A module runs on its caller's thread and on as many OpenMP threads as torch would use there.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from cluster.errors import InternalError
from cluster.model.cpu.library import Kernels, Layer
from cluster.model.cpu.weight_source import Matrix
from cluster.model.layers.parts import (
    MlpParts,
    dtype_of,
    epsilon_of,
    is_linear,
    is_rms_norm,
    is_unhooked,
    mlp_parts,
)
from cluster.model.layers.search import Settings
from cluster.model.layers.trial import agree

logger = logging.getLogger(__name__)

WeightDtype = Literal["auto", "int8"]

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_STEP_BYTES = 4  # of an output's weights lie side by side: the weights of 1, 2 or 4 inputs
# Largest relative error (2-norm) of a replacement: at least twice the error seen on Gaussian weights and
# inputs.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# One rounding to bfloat16 more or less would give 1e-3.
_NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-4}
_INT8_TOLERANCE = 5e-2
_PROBE_ROWS = 7


class PackedWeights:
    """One matrix [outputs, inputs], or two (gate, up), packed for the kernels, with the bias. Immutable:
    calls may overlap."""

    def __init__(
        self, kernels: Kernels, weight: Tensor, *, up: Tensor | None = None, bias: Tensor | None = None,
        up_bias: Tensor | None = None, int8: bool = False,
    ):  # fmt: skip
        outputs, inputs = weight.shape
        weight, up = weight.detach().contiguous(), None if up is None else up.detach().contiguous()
        inputs_a_step = _STEP_BYTES // (1 if int8 else weight.element_size())
        panels = -(-outputs * (1 if up is None else 2) // kernels.panel_outputs)
        padded_outputs = panels * kernels.panel_outputs
        suffix = _SUFFIX[weight.dtype]
        pack = getattr(kernels.cdll, f"pack_i8_{suffix}" if int8 else f"pack_{suffix}")

        def fill(matrix: Matrix) -> None:
            quantisation = (matrix.scales.data_ptr(), matrix.sums.data_ptr()) if int8 else ()
            pack(weight.data_ptr(), pointer(up), matrix.packed.data_ptr(), *quantisation, outputs, inputs)

        num_bytes = padded_outputs * -(-inputs // inputs_a_step) * _STEP_BYTES
        matrix = kernels.weights.matrix(num_bytes, padded_outputs if int8 else 0, fill)
        padded_bias = None
        if bias is not None:
            biases = [bias] if up_bias is None else [bias, up_bias]
            padded_bias = _padded_bias(biases, padded_outputs, kernels.panel_outputs)
        self._tensors = (matrix.packed, padded_bias, matrix.scales, matrix.sums)
        self.layer = Layer(*map(pointer, self._tensors), inputs, outputs, up is not None)
        self.address: int = ctypes.addressof(self.layer)  # valid while this object lives
        self._run = getattr(kernels.cdll, f"linear_i8_{suffix}" if int8 else f"linear_{suffix}")
        self._dtype, self._inputs, self._outputs = weight.dtype, inputs, outputs

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs], of the weights' dtype. Blocks."""
        shape = x.shape
        if x.dtype is not self._dtype or shape[-1] != self._inputs:
            raise InternalError(
                f"a packed layer needs {self._inputs} {self._dtype} inputs, not {shape}, {x.dtype}"
            )
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty((*shape[:-1], self._outputs), dtype=self._dtype)
        self._run(
            self.address, x.data_ptr(), y.data_ptr(), x.numel() // self._inputs, torch.get_num_threads()
        )
        return y


class PackedLinear(nn.Module):
    """y = x Wᵀ + b. Its `weight` is empty and only says the dtype, which families ask for; the linear that it
    was made from can be deleted."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, *, int8: bool = False):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        self.forward = PackedWeights(kernels, linear.weight, bias=linear.bias, int8=int8)


class PackedGatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one pass. Intermediate values are rounded to the dtype, as
    torch does."""

    def __init__(self, mlp: nn.Module, kernels: Kernels, *, int8: bool = False):
        super().__init__()
        parts = cast(MlpParts, mlp_parts(mlp))
        gate, up = parts.inputs
        self._gate_up = PackedWeights(kernels, gate.weight, up=up.weight, int8=int8)
        self._down = PackedWeights(kernels, parts.down.weight, int8=int8)

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._gate_up(x))


class NativeRmsNorm(nn.Module):
    """weight * (x / rms(x)), the quotient computed in float32 and rounded to the dtype before the product, as
    in most families; or shifted, as in Gemma and Qwen3.5: (1 + weight) * (x / rms(x)), rounded once."""

    def __init__(self, norm: nn.Module, kernels: Kernels, *, shifted: bool = False):
        super().__init__()
        self.is_shifted = shifted
        self.weight = cast(nn.Parameter, norm.weight)
        self.variance_epsilon: float = cast(float, epsilon_of(norm))
        self._run: Callable[..., None] = getattr(kernels.cdll, f"rms_norm_{_SUFFIX[self.weight.dtype]}")
        self._dtype, self._width = self.weight.dtype, self.weight.numel()
        self._kept = self.weight.detach().contiguous()
        self._address = self._kept.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not self._dtype or x.shape[-1] != self._width:
            raise InternalError(f"a norm needs {self._width} {self._dtype} values, not {x.shape}, {x.dtype}")
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty_like(x)
        rows = x.numel() // self._width
        self._run(
            self._address,
            x.data_ptr(),
            y.data_ptr(),
            rows,
            self._width,
            self.variance_epsilon,
            self.is_shifted,
            torch.get_num_threads(),
        )
        return y


def optimise(
    text_model: nn.Module, head: nn.Module, kernels: Kernels, weight_dtype: WeightDtype = "auto"
) -> nn.Module | None:
    """Replaces linears, gated MLPs and norms anywhere in `text_model`, in place. Returns the new output head;
    None: keep the old one.

    A head that shares its weight with the embedding gets a packed copy of its own. Call it before the first
    forward, in evaluation mode. Blocks: some seconds for a gigabyte of weights.
    """
    with torch.inference_mode():
        counts = _optimise_children(text_model, kernels, weight_dtype)
        new_head = _replacement(head, kernels, weight_dtype)
    logger.info(
        "native CPU kernels (%s): %d modules replaced", kernels.variant, counts + (new_head is not None)
    )
    return new_head


def optimise_modules(module: nn.Module, kernels: Kernels) -> int:
    """`optimise` for any module: replaces parts of `module` in place and returns their number."""
    with torch.inference_mode():
        return _optimise_children(module, kernels, "auto")


def _optimise_children(module: nn.Module, kernels: Kernels, weight_dtype: WeightDtype) -> int:
    count = 0
    for name, child in module.named_children():
        replacement = _replacement(child, kernels, weight_dtype)
        if replacement is None:
            count += _optimise_children(child, kernels, weight_dtype)
        else:
            setattr(module, name, replacement)
            count += 1
    return count


def _replacement(module: nn.Module, kernels: Kernels, weight_dtype: WeightDtype) -> nn.Module | None:
    """The fastest replacement that agrees with `module`; None: there is none."""
    if is_rms_norm(module):
        form = NativeRmsNorm
    elif is_linear(module):
        form = PackedLinear
    elif is_gated_by_silu(mlp := mlp_parts(module)) and not cast(MlpParts, mlp).is_adapted:
        form = PackedGatedMlp
    else:
        return None
    if not is_servable(module):
        return None
    is_packed = form is not NativeRmsNorm

    def build(settings: Settings) -> nn.Module:
        return form(module, kernels, **settings)

    def agrees(candidate: nn.Module, settings: Settings) -> bool:
        exact = _TOLERANCE if is_packed else _NORM_TOLERANCE
        return _agrees(
            module, candidate, _INT8_TOLERANCE if settings.get("int8") else exact[dtype_of(module)]
        )

    candidates: list[Settings] = [{}]
    if not is_packed:
        candidates = [{}, {"shifted": True}]
    elif weight_dtype == "int8":
        candidates = [{"int8": True}, {}]
    return kernels.weights.replacement(module, candidates, build, agrees)


def is_shifted(norms: Sequence[nn.Module], kernels: Kernels) -> bool | None:
    """Which form of `NativeRmsNorm` all of these have; None: they have no common one."""
    for shifted in (False, True):
        candidates = [NativeRmsNorm(norm, kernels, shifted=shifted) for norm in norms]
        pairs = zip(norms, candidates, strict=True)
        if all(_agrees(norm, own, _NORM_TOLERANCE[dtype_of(norm)]) for norm, own in pairs):
            return shifted
    return None


def is_gated_by_silu(mlp: MlpParts | None) -> bool:
    return (
        mlp is not None
        and len(mlp.inputs) == 2
        and all(linear.bias is None for linear in (*mlp.inputs, mlp.down))
        and isinstance(mlp.activation, (nn.SiLU, SiLUActivation))
    )


def is_servable(module: nn.Module) -> bool:
    """All parameters are in CPU memory, or are known packed only (on the meta device), of one dtype that the
    kernels support, and no hook is registered."""
    devices = {parameter.device.type for parameter in module.parameters()}
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return (
        devices <= {"cpu", "meta"} and dtypes <= _SUFFIX.keys() and len(dtypes) == 1 and is_unhooked(module)
    )


def _agrees(module: nn.Module, candidate: nn.Module, tolerance: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    first = next(module.parameters())
    x = torch.randn(1, _PROBE_ROWS, first.shape[-1], generator=generator).to(first.dtype)
    return agree(candidate(x), module(x), tolerance)


def _padded_bias(biases: Sequence[Tensor], padded_outputs: int, panel_outputs: int) -> Tensor:
    """[padded_outputs] float32 in the order of packed outputs."""
    packed = in_panels([bias.detach().float()[None] for bias in biases], panel_outputs)[0]
    assert len(packed) == padded_outputs
    return packed


def in_panels(parts: Sequence[Tensor], panel_outputs: int) -> Tensor:
    """Rows of one part, or of gate and up, [rows, outputs] float32, in the order of packed outputs: each
    panel holds some of gate's, then as many of up's. Returns [rows, packed outputs]."""
    share = panel_outputs // len(parts)
    num_panels = -(-parts[0].shape[1] // share)
    padded = [nn.functional.pad(part, (0, num_panels * share - part.shape[1])) for part in parts]
    return torch.stack([part.view(len(part), num_panels, share) for part in padded], 2).flatten(1)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
