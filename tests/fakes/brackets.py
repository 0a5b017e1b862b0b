"""What stands between brackets after a tensor, in torch's operators, as torch itself takes it apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def get_item(tensor: Tensor, index: Any) -> Tensor:
    view, indices = _basic(tensor, index)
    return _aten.index.Tensor(view, indices) if indices else view


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    view, indices = _basic(tensor, index)
    given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=tensor.dtype)
    if indices:
        _aten.index_put_.default(view, indices, given.to(tensor.device))
    elif given.dim():
        _aten.copy_.default(view, given)
    else:
        _aten.fill_.Tensor(view, given)


def _basic(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view by all that are not tensors, and the tensors that index it."""
    parts = [*index] if isinstance(index, tuple) else [index]
    taken = sum(_num_axes(part) for part in parts if part is not Ellipsis and part is not None)
    place = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[place : place + 1] = [slice(None)] * (tensor.dim() - taken)
    axis, indices = 0, []
    for part in parts:
        if part is None:
            tensor = _aten.unsqueeze.default(tensor, axis)
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = _aten.slice.Tensor(tensor, axis, part.start, part.stop, part.step or 1)
        elif isinstance(part, list) or (isinstance(part, Tensor) and part.dim()):
            rows = torch.tensor(part) if isinstance(part, list) else part
            indices += [None] * (axis - len(indices)) + [rows]
            axis += _num_axes(rows) - 1
        else:
            tensor = _aten.select.int(tensor, axis, int(part))
            continue
        axis += 1
    return tensor, indices


def _num_axes(part: Any) -> int:
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1
