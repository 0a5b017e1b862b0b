"""Fewer embedding rows of one item: means of neighbours in time and space. Pure."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_rows(rows: Tensor, grid: tuple[int, int, int], temporal: int, spatial: int) -> Tensor:
    """[t * h * w, d] rows of a grid (t, h, w) → one row for each group of `temporal` × `spatial` × `spatial`
    neighbours: their mean, computed in float32. Groups at the far edges are smaller."""
    t, h, w = grid
    volume = rows.float().view(t, h, w, -1).permute(3, 0, 1, 2)
    size = (min(temporal, t), min(spatial, h), min(spatial, w))
    means = torch.nn.functional.avg_pool3d(volume, size, size, ceil_mode=True, count_include_pad=False)
    return means.flatten(1).T.to(rows.dtype).contiguous()
