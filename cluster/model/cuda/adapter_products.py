"""What LoRA adapters add to a product, in two launches for all its linears: `shrink` and `expand`.

Nothing here reads the host's copy of anything or synchronises, so a call may be recorded in a CUDA graph:
which adapter a row has, and of which rank, is read on the device. Needs triton, which the first call imports;
enqueues on the current stream and owns no memory.

Not proven on hardware: tiles and `MAX_ROWS` are guesses (`bench.gpu`, part adapters).
"""

from __future__ import annotations

from torch import Tensor

from cluster.model.adapters import SlotMatrices
from cluster.model.cuda.tiles import power_of_two

MAX_ROWS = 64  # more rows are multiplied with all slots, on tensor cores
_RANKS, _STEP, _TILE = 4, 512, 256  # of a program


def add_adapters(y: Tensor, x: Tensor, updates: SlotMatrices) -> None:
    """x [T, inputs], y [T, outputs], both contiguous; y is changed in place. Enqueued."""
    slots = updates.step.slots
    if slots is None:
        return
    if not 0 < len(x) <= MAX_ROWS:
        return updates.add_to(y, x)
    add_to_few(y, x, slots, updates)


def add_to_few(y: Tensor, x: Tensor, slots: Tensor, updates: SlotMatrices) -> None:
    """`add_adapters` by our kernels, for any number of rows."""
    from cluster.model.cuda import adapter_kernels

    (num_rows, width), num_outputs = x.shape, y.shape[1]
    linears, num_slots, rank = updates.num_linears, updates.step.num_slots, updates.step.rank
    low = x.new_empty(num_rows, linears, rank)
    ranks = min(_RANKS, power_of_two(rank))
    adapter_kernels.shrink[(num_rows, linears, -(-rank // ranks))](
        x, updates.down, slots, updates.ranks, low, width, num_slots, RANK=rank, RANKS=ranks,
        LINEARS=linears, STEP=_STEP, num_warps=4,
    )  # fmt: skip
    adapter_kernels.expand[(num_rows, -(-num_outputs // _TILE))](
        low, updates.up, slots, updates.ranks, updates.ends, y, num_outputs, num_slots, RANK=rank,
        LINEARS=linears, TILE=_TILE, num_warps=4,
    )  # fmt: skip
