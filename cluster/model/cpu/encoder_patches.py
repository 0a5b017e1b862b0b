"""Convolutions that cut pixels into patches without overlap, run as one native product.

Such a convolution (its stride is its kernel, of more than one pixel) is a linear over the values of a patch.
A replacement is compared with its module on random input before it takes its place.

A module runs on its caller's thread and on as many OpenMP threads as torch would use there.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from cluster.model.cpu.library import Kernels
from cluster.model.cpu.modules import PackedWeights, is_servable
from cluster.model.layers.parts import dtype_of
from cluster.model.layers.trial import agree

logger = logging.getLogger(__name__)

# Largest relative error (2-norm), as for linears.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class NativePatches(nn.Module):
    """[n, channels, *sizes] → [n, outputs, *(size // kernel)]; pixels behind the last whole patch are
    ignored."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d, kernels: Kernels):
        super().__init__()
        weight = convolution.weight
        self.bias = convolution.bias
        no_values = torch.empty(0, dtype=weight.dtype)  # transformers reads its dtype
        self.weight = nn.Parameter(no_values, requires_grad=False)
        self._kernel = convolution.kernel_size
        self._project = PackedWeights(kernels, weight.flatten(1), bias=convolution.bias)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [size // kernel for size, kernel in zip(x.shape[2:], self._kernel, strict=True)]
        rows = self._project(self._patches(x, sizes))
        return rows.view(len(x), *sizes, rows.shape[-1]).movedim(-1, 1).contiguous()

    def _patches(self, x: Tensor, sizes: list[int]) -> Tensor:
        """[n * patches, channels * values of a patch]"""
        if all(size == 1 for size in sizes) and x.shape[2:] == self._kernel:
            return x.flatten(1)
        split = list(x.shape[:2])
        for axis, (size, kernel) in enumerate(zip(sizes, self._kernel, strict=True), start=2):
            x = x.narrow(axis, 0, size * kernel)
            split += [size, kernel]
        outer, inner = range(2, len(split), 2), range(3, len(split), 2)
        patches = x.reshape(split).permute(0, *outer, 1, *inner)
        return patches.flatten(len(sizes) + 1).flatten(0, len(sizes))


def optimise_patches(module: nn.Module, kernels: Kernels) -> int:
    """Replaces such convolutions anywhere in `module`, in place; returns how many. Call it in evaluation
    mode. Blocks."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Conv2d | nn.Conv3d) and _cuts_patches(child)
    ]
    count = 0
    with torch.inference_mode():
        for parent, name, child in found:
            native = _replacement(child, kernels)
            if native is not None:
                setattr(parent, name, native)
                count += 1
    logger.info("native CPU kernels (%s): %d patch projections replaced", kernels.variant, count)
    return count


def _replacement(convolution: nn.Conv2d | nn.Conv3d, kernels: Kernels) -> NativePatches | None:
    return kernels.weights.replacement(
        convolution,
        [{}],
        lambda _settings: NativePatches(convolution, kernels),
        lambda native, _settings: _agrees(convolution, native),
    )


def _cuts_patches(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    return (
        is_servable(convolution)
        and max(convolution.kernel_size) > 1  # Parakeet masks what it knows as a convolution by its type
        and convolution.stride == convolution.kernel_size
        and convolution.padding in ("valid", (0,) * len(convolution.kernel_size))
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
    )


def _agrees(convolution: nn.Conv2d | nn.Conv3d, native: NativePatches) -> bool:
    generator = torch.Generator().manual_seed(0)
    sizes = [2 * kernel + 1 for kernel in convolution.kernel_size]
    x = torch.randn(2, convolution.in_channels, *sizes, generator=generator).to(dtype_of(convolution))
    return agree(native(x), convolution(x), _TOLERANCE[x.dtype])
