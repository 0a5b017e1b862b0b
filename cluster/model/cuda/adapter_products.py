"""What LoRA adapters add to a product, in two launches for all its linears: `shrink` and `expand`.

Nothing here reads the host's copy of anything or synchronises, so a call may be recorded in a CUDA graph:
which adapter a row has, and of which rank, is read on the device. Needs triton, which the first call imports;
enqueues on the current stream and owns no memory.

Tiles are reasoned, not measured (`bench.gpu`, part adapters).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.tiles import power_of_two
from cluster.model.slot_matrices import SlotMatrices

MAX_ROWS = 64  # more rows are multiplied with all slots, on tensor cores
# Of a program: ranks, columns of x that it sums, outputs; and rows, where there are more than _FEW. One warp
# has all ranks of an output in one thread, so its sums need no barriers.
_RANKS, _STEP, _TILE = 16, 512, 128
_FEW, _ROWS = 16, 4
_SHRINK_WARPS, _EXPAND_WARPS = 4, 1


def add_adapters(y: Tensor, x: Tensor, updates: SlotMatrices) -> None:
    """x [T, inputs], y [T, outputs], both contiguous; y is changed in place. Enqueued."""
    if updates.step.slots is None:
        return
    if not 0 < len(x) <= MAX_ROWS:
        return updates.add_to(y, x)
    add_to_few(y, x, updates)


def add_to_few(y: Tensor, x: Tensor, updates: SlotMatrices) -> None:
    """`add_adapters` by our kernels, for any number of rows."""
    from cluster.model.cuda import adapter_kernels

    (num_rows, width), num_outputs = x.shape, y.shape[1]
    linears, num_slots, rank = updates.num_linears, updates.step.num_slots, updates.step.rank
    ranks, shares = min(_RANKS, power_of_two(rank)), -(-width // _STEP)
    low = x.new_empty(num_rows, linears, shares, rank, dtype=torch.float32)
    # in float32 a program of several rows sums in another order
    rows = 1 if num_rows <= _FEW or x.dtype == torch.float32 else _ROWS
    order, slots = (None, updates.step.slots) if rows == 1 else updates.step.in_order()
    runs = -(-num_rows // rows)
    sizes: dict[str, Any] = {
        "RANK": rank, "RANKS": ranks, "LINEARS": linears, "SLOTS": power_of_two(1 + num_slots), "ROWS": rows,
        "num_stages": 1, "enable_fp_fusion": False, **early(x.device),
    }  # fmt: skip
    adapter_kernels.shrink[(runs, linears * -(-rank // ranks), shares)](
        x, updates.down, order, slots, updates.ranks, low, num_rows, width, num_slots, shares,
        STEP=_STEP, num_warps=_SHRINK_WARPS, **sizes,
    )  # fmt: skip
    adapter_kernels.expand[(runs, -(-num_outputs // _TILE))](
        low, updates.up, order, slots, updates.ranks, updates.ends, y, num_rows, num_outputs, num_slots,
        shares,
        ENDS=power_of_two(1 + linears), SHARES=power_of_two(shares), TILE=_TILE,
        num_warps=_EXPAND_WARPS, **sizes,
    )  # fmt: skip
