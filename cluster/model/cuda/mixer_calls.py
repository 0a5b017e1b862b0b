"""What mixers by Triton kernels share (`mixers`): where the states of a step lie, products of inputs, the
launch of the convolution, and the order of all of it. Runs on the engine's thread; enqueues on the current
stream and reads nothing on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cluster.model.cuda.early import early
from cluster.model.cuda.merging import merged_linears
from cluster.model.cuda.products import product
from cluster.model.cuda.tiles import power_of_two
from cluster.model.state_step import StatefulForward, StepState

SMALLEST = 16  # sides of a matrix that units for products take
CHANNEL_TILE = 256  # of a convolution
# Of a program of a convolution, in steps with prompts. More numbers a thread take seconds to compile.
_CONV_TOKENS, _CONV_WARPS = 8, 8


@dataclass(frozen=True)
class Pages:
    """Where the states of the step's sequences lie, as kernels take them, and the spans."""

    source: Tensor
    target: Tensor
    starts: Tensor
    firsts: Tensor
    spans: Tensor
    page_stride: int
    first_page: int
    num_spans: int

    @classmethod
    def of(cls, step: StepState, number: int) -> Pages:
        """number: of the layer among those with states."""
        tensors, source, target = step.tensors, step.source_pages, step.target_pages
        return cls(
            source, target, tensors.starts, tensors.firsts, tensors.spans, source.stride(0),
            step.layout.first_page(number), len(tensors.firsts),
        )  # fmt: skip


class Linears:
    """Several linears with one input, as one product where their weights are one matrix (`merging`)."""

    def __init__(self, linears: Sequence[nn.Module]):
        self._linears = linears
        plain = [linear for linear in linears if type(linear) is nn.Linear]
        self._whole = merged_linears(plain) if len(plain) == len(linears) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] → [T, sum of outputs], rows contiguous."""
        if self._whole is not None:
            return product(x, *self._whole, is_whole=True)[0]
        return torch.cat([linear(x) for linear in self._linears], -1)

    def shares(self, x: Tensor) -> Tensor:
        """[T, N] → shares [S, T, sum of outputs], as `product` gives them."""
        return self(x)[None] if self._whole is None else product(x, *self._whole)


@dataclass(frozen=True)
class Convolution:
    """One whose outputs silu follows.

    columns: where its channels lie in a row, as `mixer_kernels.convolve` takes them. page: its elements."""

    weight: Tensor  # [channels, 1, taps]
    bias: Tensor | None
    columns: Mapping[str, int]
    page: int

    @classmethod
    def of_neighbours(cls, module: nn.Conv1d, first: int, page_bytes: int) -> Convolution:
        """Its channels lie side by side in a row, from this column on."""
        weight = module.weight
        columns = {
            "KEY_HEADS": 1, "GROUP": 1, "K": 0, "V": len(weight), "Q0": first, "K0": first, "V0": first,
            "KEY_STEP": 0, "VALUE_STEP": len(weight),
        }  # fmt: skip
        return cls(weight, module.bias, columns, page_bytes // weight.dtype.itemsize)


def convolved(projected: Tensor, own: Convolution, pages: Pages, step: StepState) -> Tensor:
    """projected [T, ...] → [T, channels]; one launch, which keeps the states of the convolution, too."""
    from cluster.model.cuda import mixer_kernels

    num_tokens, width = len(projected), own.weight.shape[0]
    mixed = torch.empty(num_tokens, width, dtype=projected.dtype, device=projected.device)
    tile = min(CHANNEL_TILE, power_of_two(width))
    tokens, warps = (1, 4) if step.tensors.is_decode else (_CONV_TOKENS, _CONV_WARPS)
    mixer_kernels.convolve[(-(-num_tokens // tokens), -(-width // tile))](
        projected, own.weight, own.bias, step.kv.buffer.view(projected.dtype), pages.source, pages.target,
        pages.starts, pages.firsts, pages.spans, mixed, num_tokens, projected.stride(0), pages.page_stride,
        pages.first_page, TOKENS=tokens, TILE=tile, TAPS=own.weight.shape[-1], PAGE=own.page, **own.columns,
        num_warps=warps, **early(projected.device),
    )  # fmt: skip
    return mixed


class PagedMixer:
    """Implements `SharesKernel`: products, a convolution, and what a subclass computes behind it."""

    def __init__(
        self, forward: StatefulForward, inputs: Sequence[nn.Module], conv: Convolution, out: nn.Module
    ):
        self._number, self._conv = forward.number, conv
        self._inputs, self._out = Linears(inputs), Linears([out])
        offset = next(place.start for tensor, place in forward.states.places if tensor.is_recurrent)
        # of the recurrent state, in float32 numbers
        self._place = {"PAGE": forward.layout.page_bytes // 4, "OFFSET": offset // 4}

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out(self._answers(rows, step))

    def shares(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out.shares(self._answers(rows, step))

    def _answers(self, rows: Tensor, step: StepState) -> Tensor:
        projected, pages = self._projected(rows), Pages.of(step, self._number)
        mixed = convolved(projected, self._conv, pages, step)
        return self._behind_convolution(projected, mixed, pages, step)

    def _projected(self, rows: Tensor) -> Tensor:
        return self._inputs(rows.contiguous())

    def _behind_convolution(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState) -> Tensor:
        """projected, mixed: as `convolved` takes and gives them. Returns [T, inputs of the last product]."""
        raise NotImplementedError


def kinds_of(forward: StatefulForward) -> list[tuple[bool, torch.dtype, tuple[int, ...]]]:
    """Whether each state of the layer is recurrent, its dtype, and its shape."""
    return [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
