"""Matrices with one input become one matrix while they move to a GPU: [q; k; v] and [gate; up] of every
decoder layer and of every block of a tower, and the inputs of mixers with a delta rule, which one product
then multiplies. The weights of the modules become views of it, so that modules and kernels share one
copy, and no second one exists at any time. What was merged is seen by the addresses alone (`merged`). Runs on
the thread that loads the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from cluster.model.layers.blocks import block_parts
from cluster.model.layers.codes import CodedLinear, Codes, alike
from cluster.model.layers.mixer_parts import kimi_inputs, mixer_inputs
from cluster.model.layers.parts import decoder_parts

_CODES = ("numbers", "scales", "zeros")
Copy = Callable[[Tensor, Tensor], object]  # into the first, from the second


def merge_inputs(model: nn.Module, device: torch.device) -> None:
    """Moves these matrices alone; all weights of `model` are in the memory of the CPU. Blocks."""
    for module in list(model.modules()):
        merge_layer(module, device, Tensor.copy_)


@torch.no_grad()
def merge_shares(model: nn.Module, device: torch.device) -> None:
    """Merges these matrices of a rank, whose weights are on the device already: while one is merged, it is
    there twice. Blocks."""
    merge_inputs(model, device)
    torch.cuda.empty_cache()  # torch keeps the memory that each of them had


def merge_layer(module: nn.Module, device: torch.device, copy: Copy) -> None:
    """Moves these matrices if the module is a decoder layer, a block of a tower or a mixer with a delta
    rule."""
    if (inputs := mixer_inputs(module) or kimi_inputs(module)) is not None:
        _merge(inputs.linears, device, copy)
    if (block := block_parts(module)) is not None:
        _give_biases(block.projections)
        _merge(block.projections, device, copy)
        _merge(block.up, device, copy)
    if (parts := decoder_parts(module)) is None:
        return
    if parts.attention.inner is not None:
        _merge(parts.attention.inner.projections, device, copy)
    if parts.mlp.inner is not None:
        _merge(parts.mlp.inner.inputs, device, copy)


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


def merged_linears(linears: Sequence[nn.Linear]) -> tuple[Tensor | Codes, Tensor | None] | None:
    """The weight and the bias of all of them as one; None: they are not neighbours, or some have no bias."""
    codes = [linear.codes for linear in linears if isinstance(linear, CodedLinear)]
    if len(codes) not in (0, len(linears)):
        return None
    weight = merged_codes(codes) if codes else merged([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = merged(biases) if biases else None
    if weight is None or (biases and (bias is None or len(biases) < len(linears))):
        return None
    return weight, bias


def merged_codes(matrices: Sequence[Codes]) -> Codes | None:
    """One matrix over all of them, as `merged` finds it; None: their tensors are not neighbours."""
    first = matrices[0]
    if len({(*each.columns, each.scale_rows) for each in matrices}) > 1:
        return None
    whole = {name: merged([getattr(each, name) for each in matrices]) for name in _tensors(first)}
    return None if None in whole.values() else replace(first, **whole)


def _merge(linears: Sequence[nn.Linear], device: torch.device, copy: Copy) -> None:
    """Moves the linears, unless they differ in what one product must share."""
    has_bias = {linear.bias is not None for linear in linears}
    weights = _weights(linears)
    if len(linears) == 1 or weights is None or len(has_bias) > 1:
        return
    for leaf in (*weights, "bias") if has_bias == {True} else weights:
        _move([(linear, leaf) for linear in linears], device, copy)


def _give_biases(linears: Sequence[nn.Linear]) -> None:
    """Zeros, where others have a bias (Whisper's keys have none)."""
    if all(linear.bias is None for linear in linears):
        return
    for linear in linears:
        if linear.bias is None:
            zeros = torch.zeros(linear.out_features, dtype=linear.weight.dtype, device=linear.weight.device)
            linear.bias = nn.Parameter(zeros, requires_grad=False)


def _weights(linears: Sequence[nn.Linear]) -> tuple[str, ...] | None:
    """The names of the tensors that are a linear's weight; None: the weights cannot become one."""
    coded = [linear for linear in linears if isinstance(linear, CodedLinear)]
    if not coded:
        return ("weight",) if len({linear.weight.dtype for linear in linears}) == 1 else None
    matrices = alike([linear.codes for linear in coded])
    if matrices is None or len(coded) < len(linears):
        return None
    for linear, codes in zip(coded, matrices, strict=True):
        linear.set_codes(codes)
    return tuple(_tensors(matrices[0]))


def _tensors(codes: Codes) -> dict[str, Tensor]:
    return {name: tensor for name in _CODES if (tensor := getattr(codes, name)) is not None}


def _move(places: Sequence[tuple[nn.Linear, str]], device: torch.device, copy: Copy) -> None:
    parameters: list[Tensor] = [getattr(linear, leaf) for linear, leaf in places]
    sizes = [len(parameter) for parameter in parameters]
    whole = torch.empty(
        sum(sizes), *parameters[0].shape[1:], dtype=parameters[0].dtype, device=device
    )  # fmt: skip
    for (linear, leaf), parameter, part in zip(places, parameters, whole.split(sizes), strict=True):
        copy(part, parameter.detach())
        is_parameter = isinstance(parameter, nn.Parameter)
        setattr(linear, leaf, nn.Parameter(part, parameter.requires_grad) if is_parameter else part)
