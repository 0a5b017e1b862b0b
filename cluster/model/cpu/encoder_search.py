"""The native calls of CPUs in the place of blocks of vision and audio encoders: which blocks they take
(`cluster.model.layers.block_search` finds, compares and replaces them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from transformers.activations import GELUActivation, GELUTanh, QuickGELUActivation, SiLUActivation

from cluster.model.attention_cpu import MAX_WIDTH
from cluster.model.cpu.encoder_layer import Activation, EncoderSteps, NativeEncoderLayer
from cluster.model.cpu.library import Kernels
from cluster.model.cpu.modules import is_servable
from cluster.model.layers.block_search import replace_blocks
from cluster.model.layers.blocks import BlockParts
from cluster.model.layers.search import ReplacementSource

_KINDS: Mapping[type[nn.Module], Activation] = {
    GELUActivation: Activation.GELU,
    nn.GELU: Activation.GELU,
    GELUTanh: Activation.GELU_TANH,
    QuickGELUActivation: Activation.QUICK_GELU,
}


def optimise_encoder_layers(module: nn.Module, kernels: Kernels) -> int:
    """Replaces blocks anywhere in `module`, in place; returns how many. Call it in evaluation mode, before
    `modules.optimise_modules`. Blocks: some seconds for a gigabyte of weights."""
    return replace_blocks(module, _CpuBlockKernels(kernels))


class _CpuBlockKernels:
    """Implements `BlockKernels`."""

    trial_lengths = (5, 19, 1)

    def __init__(self, kernels: Kernels):
        self._kernels, self._steps = kernels, EncoderSteps()

    @property
    def name(self) -> str:
        return f"native CPU kernels ({self._kernels.variant})"

    @property
    def source(self) -> ReplacementSource:
        return self._kernels.weights

    def builder(self, parts: BlockParts) -> Callable[[bool], NativeEncoderLayer] | None:
        activation = _activation(parts)
        if activation is None or not _fits(parts) or not is_servable(parts.block):
            return None
        return lambda returns_tuple: NativeEncoderLayer(
            parts, activation, self._kernels, self._steps, returns_tuple=returns_tuple
        )


def _activation(parts: BlockParts) -> Activation | None:
    module = parts.activation
    if parts.is_gated:
        return Activation.GATED if isinstance(module, (nn.SiLU, SiLUActivation)) else None
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return Activation.GELU_TANH
    return _KINDS.get(type(module))


def _fits(parts: BlockParts) -> bool:
    """Whether the kernels know such a block: as many heads of keys as of queries, without norms, and rotated
    only in packed rows. Rows have an even length, because bfloat16 is read in pairs."""
    return (
        parts.num_kv_heads == parts.num_heads
        and not parts.head_norms
        and (parts.is_packed or not parts.is_rotated)
        and parts.head_width % 2 == 0
        and parts.head_width <= MAX_WIDTH
        and parts.hidden_size % 2 == 0
        and parts.down.in_features % 2 == 0
        and len({linear.bias is None for linear in parts.up}) == 1
    )
