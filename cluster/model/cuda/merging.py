"""Matrices with one input become one matrix while they move to a GPU: [q; k; v] and [gate; up] of every
decoder layer, which one product then multiplies. The weights of the modules become views of it, so that
modules and kernels share one copy, and no second one exists at any time. What was merged is seen by the
addresses alone (`merged`). Runs on the thread that loads the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cluster.model.layers.parts import decoder_parts


def merge_inputs(model: nn.Module, device: torch.device) -> None:
    """Moves these matrices alone; all weights of `model` are in the memory of the CPU. Blocks."""
    for module in list(model.modules()):
        if (parts := decoder_parts(module)) is None:
            continue
        if parts.attention.inner is not None:
            _merge(parts.attention.inner.projections, device)
        if parts.mlp.inner is not None:
            _merge(parts.mlp.inner.inputs, device)


def merged(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all of them, whose first dimensions follow each other; None: they are not neighbours in
    memory. It shares their storage."""
    first, address = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        address += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in tensors)
    try:
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    except RuntimeError:  # neighbours by chance, in storages of their own
        return None


def _merge(linears: Sequence[nn.Linear], device: torch.device) -> None:
    """Moves the linears, unless they differ in what one product must share."""
    dtypes = {linear.weight.dtype for linear in linears}
    has_bias = {linear.bias is not None for linear in linears}
    if len(linears) == 1 or len(dtypes) > 1 or len(has_bias) > 1:
        return
    for leaf in ("weight", "bias") if has_bias == {True} else ("weight",):
        _move([(linear, leaf) for linear in linears], device)


def _move(places: Sequence[tuple[nn.Linear, str]], device: torch.device) -> None:
    parameters = [linear.get_parameter(leaf) for linear, leaf in places]
    sizes = [len(parameter) for parameter in parameters]
    whole = torch.empty(
        sum(sizes), *parameters[0].shape[1:], dtype=parameters[0].dtype, device=device
    )  # fmt: skip
    for (linear, leaf), parameter, part in zip(places, parameters, whole.split(sizes), strict=True):
        part.copy_(parameter.detach())
        setattr(linear, leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
