"""Weights that stay codes: how they lie in memory, whatever the checkpoint's layout was, and what has them in
place of weights: a linear, and the matrices of a layer's experts.

Letters: N outputs (rows), K inputs (columns), G groups of columns that have one scale, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RUN = 128  # columns whose 4 bit codes lie in 16 words
WORDS = 16
_CHUNK = 1 << 22  # weights that are float32 at once
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by their codes
_EXPONENT_BIAS, EXPONENT_NAN = 127, 255


class CodeKind(IntEnum):
    """What a code is. The values are constants of `cluster.model.cuda.coded_kernels`."""

    E4M3 = 0
    BYTE = 1  # an integer of 8 bits
    NIBBLE = 2  # an integer of 4 bits
    E2M1 = 3  # a float of 4 bits


@dataclass(frozen=True)
class Codes:
    """weight[n, k] = (code[n, k] - zero) * scale, in float32. All tensors are contiguous.

    numbers     of 8 bits: [N, K] uint8. Of 4 bits: [N, ceil(K / 128), 16] int32, where four bits of a word,
                from bit 4 * j on, are column 16 * j + i of the run, for word i; columns from K on are zero
    scales      [ceil(N / scale_rows), G]: numbers, or uint8, exponents of 2 plus 127 (of E2M1: MXFP4)
    zeros       uint8 of the same shape; None: all are the middle of the integers, and floats have none
    width       K
    group       columns that have one scale: a multiple of 16, or all
    scale_rows  rows that have one scale
    """

    kind: CodeKind
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    width: int
    group: int
    scale_rows: int

    @property
    def middle(self) -> int:
        """The code of 0 where there are no `zeros`."""
        return {CodeKind.BYTE: 128, CodeKind.NIBBLE: 8}.get(self.kind, 0)

    @property
    def words(self) -> Tensor:
        """`numbers` as int32, of 8 bits [N, K / 4], without a copy."""
        return self.numbers.view(torch.int32)

    @property
    def form(self) -> tuple[object, ...]:
        """Two matrices of one form run by the same kernels, in the same way."""
        return (*self.columns, self.scale_rows, len(self.numbers))

    @property
    def columns(self) -> tuple[object, ...]:
        """Rows of two matrices can follow each other where this is equal."""
        return self.kind, self.width, self.group, self.scales.dtype, self.zeros is None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.numbers, self.scales, self.zeros) if each is not None)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K], in float32 and rounded once to `dtype`, by plain torch."""
        num_rows, device = len(self.numbers), self.numbers.device
        out = torch.empty(num_rows, self.width, dtype=dtype, device=device)
        groups = torch.arange(self.width, device=device) // self.group
        step = max(1, _CHUNK // self.width)
        for first, part in zip(range(0, num_rows, step), out.split(step), strict=True):
            blocks = torch.arange(first, first + len(part), device=device) // self.scale_rows
            zeros = self.middle if self.zeros is None else self.zeros[blocks].float()[:, groups]
            scales = as_numbers(self.scales[blocks])
            part.copy_((self._floats(first, len(part)) - zeros) * scales[:, groups])
        return out

    def _floats(self, first: int, num_rows: int) -> Tensor:
        numbers = self.numbers[first : first + num_rows]
        if self.kind is CodeKind.E4M3:
            return numbers.view(torch.float8_e4m3fn).float()
        if self.kind is CodeKind.BYTE:
            return numbers.float()
        shifts = 4 * torch.arange(8, dtype=torch.int32, device=numbers.device)
        columns = ((numbers.unsqueeze(2) >> shifts[:, None]) & 15).flatten(1)[:, : self.width]
        return E2M1.to(numbers.device)[columns] if self.kind is CodeKind.E2M1 else columns.float()

    def to(self, device: torch.device) -> Codes:
        """Blocks where the device is another one."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device), zeros=zeros)

    def rows(self, first: int, end: int) -> Codes:
        """Some of the rows, without a copy. first: where those begin that share a scale."""
        blocks = slice(first // self.scale_rows, -(-end // self.scale_rows))
        zeros = None if self.zeros is None else self.zeros[blocks]
        return replace(self, numbers=self.numbers[first:end], scales=self.scales[blocks], zeros=zeros)

    def with_scales_of(self, scale_rows: int) -> Codes:
        """With scales (and zeros) repeated for so many rows each, a divisor of those that share one now."""
        if scale_rows == self.scale_rows:
            return self
        num_rows = len(self.numbers)
        blocks = torch.arange(0, num_rows, scale_rows, device=self.scales.device) // self.scale_rows
        zeros = None if self.zeros is None else self.zeros[blocks]
        return replace(self, scales=self.scales[blocks], zeros=zeros, scale_rows=scale_rows)


def as_numbers(scales: Tensor) -> Tensor:
    """Scales of `Codes` in float32."""
    numbers = scales.float()
    return (numbers - _EXPONENT_BIAS).exp2() if scales.dtype == torch.uint8 else numbers


def runs_of(own: range, size: int) -> tuple[Tensor, int]:
    """own: successive rows (or columns) of a matrix in which `size` rows, from 0 on, have one scale. Returns
    which scales runs of them have, one for each, and how many rows a run has: a number that divides all of
    them evenly, wherever the rows begin."""
    first, last = own.start // size, (own.stop - 1) // size
    if first == last:
        return torch.tensor([first]), size if own.start % size == 0 else len(own)
    run = math.gcd(own.start, size)
    return torch.arange(own.start, own.stop, run) // size, run


def have_kernels(runs: int, width: int) -> bool:
    """Whether kernels compute with codes of so many columns, of which `runs` have one scale. They read codes
    of 8 bits by words of 4."""
    return width % 4 == 0 and (runs >= width or runs % WORDS == 0)


def joined(matrices: Sequence[Codes]) -> Codes:
    """One matrix of the rows of all, which differ in nothing but their rows."""
    parts = alike(matrices)
    if parts is None:
        raise ValueError("matrices of different columns cannot follow each other")
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        numbers=torch.cat([each.numbers for each in parts]),
        scales=torch.cat([each.scales for each in parts]),
        zeros=None if parts[0].zeros is None else torch.cat([cast(Tensor, each.zeros) for each in parts]),
    )


def in_words(codes: Tensor) -> Tensor:
    """Codes of 4 bits [N, K], as any integers, to [N, ceil(K / 128), 16] int32."""
    padded = F.pad(codes.int(), (0, -codes.shape[1] % RUN)).unflatten(1, (-1, RUN // WORDS, WORDS))
    words = padded[:, :, 0].clone()
    for place in range(1, RUN // WORDS):
        words |= padded[:, :, place] << 4 * place
    return words


def alike(matrices: Sequence[Codes]) -> list[Codes] | None:
    """The matrices with scales for equally many rows, so that their tensors can follow each other as one
    matrix; None: they differ in more."""
    if len({each.columns for each in matrices}) > 1:
        return None
    sizes = {each.scale_rows for each in matrices}
    fit = all(len(each.numbers) % each.scale_rows == 0 for each in matrices[:-1])
    scale_rows = sizes.pop() if len(sizes) == 1 and fit else 1
    return [each.with_scales_of(scale_rows) for each in matrices]


CodedProduct = Callable[[Tensor, Codes, Tensor | None], Tensor]
# as transformers calls a function of experts: the module, x [T, H], chosen experts and their weights [T, k]
ExpertsForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CodedKernels:
    """What computes from codes. product: x [T, K], the codes and the bias → [T, N] in x's dtype."""

    product: CodedProduct
    experts: ExpertsForward


class CodedModule(nn.Module):
    """Has a weight as codes. They are buffers, because a layer's dtype is that of its parameters."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None

    def set_codes(self, codes: Codes) -> None:
        """Other tensors of the same weight."""
        self._kind, self._width = codes.kind, codes.width
        self._group, self._scale_rows = codes.group, codes.scale_rows
        self.register_buffer("numbers", codes.numbers)
        self.register_buffer("scales", codes.scales)
        self.register_buffer("zeros", codes.zeros)

    @property
    def codes(self) -> Codes:
        return Codes(
            self._kind, self.numbers, self.scales, self.zeros, self._width, self._group, self._scale_rows
        )  # fmt: skip


class CodedLinear(CodedModule, nn.Linear):
    """A linear whose weight is codes. Of a rank's piece of a linear, `in_features` and `out_features` may be
    those of the whole."""

    def __init__(
        self, codes: Codes, bias: Tensor | None, product: CodedProduct,
        features: tuple[int, int] | None = None,
    ):  # fmt: skip
        """features: inputs and outputs; None: those of the codes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = features or (codes.width, len(codes.numbers))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._product = product
        self.set_codes(codes)

    @property
    def weight(self) -> Tensor:
        """The plain weight in float32, made at every call: for code that looks at it, not to compute with."""
        return self.codes.plain(torch.float32)

    def multiply(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]: by these codes alone, whatever a call adds to it."""
        codes = self.codes
        rows = x.reshape(-1, codes.width).contiguous()
        return self._product(rows, codes, self.bias).view(*x.shape[:-1], len(codes.numbers))

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class CodedExperts(CodedModule):
    """One matrix of each expert, in place of a parameter [E, N, K] or [E, K, N]. codes: their rows, expert by
    expert [E × N, K]; no scale is for rows of two experts."""

    def __init__(self, codes: Codes, num_experts: int):
        super().__init__()
        self._num_experts = num_experts
        self.set_codes(codes)

    def __len__(self) -> int:
        return self._num_experts

    @property
    def num_outputs(self) -> int:
        return len(self.numbers) // self._num_experts

    def of(self, expert: int) -> Codes:
        return self.codes.rows(expert * self.num_outputs, (expert + 1) * self.num_outputs)
