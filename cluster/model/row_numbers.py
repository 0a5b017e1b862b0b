"""Numbers of rows in place of the weights that transformers reads (`coded_linears`, `coded_experts`). How a
parameter of numbers is divided over ranks, as its weights are, and which rows numbers are of. Rows that a
rank has are those whose numbers it gets; columns, of which numbers say nothing, are divided by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

FIRST_ROW = 1 << 32  # times the number of a weight: the number of its first row


class NumberedRows:
    """Sliced in place of a quantised weight: numbers of its rows, as matrices of one column."""

    def __init__(self, shape: Sequence[int], number: int, columns_axis: int):
        """shape: of the weight. number: of the weight. columns_axis: of the shape."""
        sizes = [*shape]
        sizes[columns_axis] = 1
        first = number * FIRST_ROW
        self._rows, self._columns_axis = torch.arange(first, first + prod(sizes)).view(sizes), columns_axis

    def get_shape(self) -> list[int]:
        return list(self._rows.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """index: an ellipsis, or slices of leading axes. Whichever columns are asked for have the one
        column."""
        axes = [*index] if isinstance(index, tuple) else [index]
        if index is not ... and len(axes) > self._columns_axis:
            axes[self._columns_axis] = slice(None)
        return self._rows[tuple(axes)]


@dataclass(frozen=True)
class RowDivision:
    """column: a parameter of numbers on the meta device, divided as the weight is, but for its columns.
    columns: of the weight, by rank."""

    column: Tensor
    columns: Sequence[range]
    rank: int = 0

    @property
    def own_columns(self) -> range:
        return self.columns[self.rank]


def row_division(weight: Tensor, *, columns_axis: int) -> RowDivision | None:
    """weight: on the meta device, [rows, columns], or of experts in front of either order. None: its rows are
    not what ranks divide, or one of them has none."""
    shape = list(weight.shape)
    width, shape[columns_axis] = shape[columns_axis], 1
    column = torch.empty(shape, dtype=torch.int64, device="meta")
    if not isinstance(weight, DTensor):
        return RowDivision(column, [range(width)])
    rank, num_ranks = weight.device_mesh.get_local_rank(), weight.device_mesh.size()
    if len(weight.placements) != 1 or not hasattr(weight.placements[0], "dim"):
        return None
    (placement,) = weight.placements
    axis = placement.dim % weight.ndim
    if axis == columns_axis:
        share = -(-width // num_ranks)
        columns = [range(first, min(first + share, width)) for first in range(0, width, share)]
        fits = type(placement) is Shard and len(columns) == num_ranks
        return RowDivision(column, columns, rank) if fits else None
    size = weight.shape[axis] // (1 if type(placement) is Shard else 2)  # both halves of rows are divided
    if (num_ranks - 1) * -(-size // num_ranks) >= size:
        return None
    column = distribute_tensor(column, weight.device_mesh, weight.placements, src_data_rank=None)
    return RowDivision(column, [range(width)] * num_ranks, rank)


def runs_in(numbers: Tensor) -> list[range]:
    """numbers [N], on the CPU. Returns runs of successive ones, in order."""
    ends = [*((numbers.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(numbers)]
    starts = [0, *ends[:-1]]
    firsts = numbers[starts].tolist()
    return [range(first, first + end - start) for first, start, end in zip(firsts, starts, ends, strict=True)]
