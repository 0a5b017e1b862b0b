"""Draws on a GPU: two launches and one copy to the device for all rows that have no filter, whatever their
number; with filters, torch has dropped tokens before. The kernels are those of `draw_kernels`, which the
first call imports.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from cluster.model.cuda.tiles import power_of_two

GREEDY = -1.0  # as a temperature
_TILE = 4096  # tokens


def draw_tokens(
    logits: Tensor, rows: Sequence[int], temperatures: Sequence[float], keys: Sequence[int]
) -> Tensor:
    """[len(rows)] int64 token ids, on the device of logits [B, V] float32, whose last dimension is dense.
    `temperatures`: of the rows; `GREEDY`: the most probable token, whatever the key. `keys`: of the rows'
    noise. Enqueues, and does not wait."""
    kernels = import_module("cluster.model.cuda.draw_kernels")
    vocab_size = logits.shape[-1]
    num_tiles = -(-vocab_size // _TILE)
    records = [
        (row, key, struct.unpack("<i", struct.pack("<f", temperature))[0])
        for row, key, temperature in zip(rows, keys, temperatures, strict=True)
    ]
    sent = to_device(records, logits.device)
    scores = torch.empty(len(records), num_tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(len(records), dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    kernels.tile_scores[(len(records), num_tiles)](
        logits, sent, scores, stride, vocab_size, TILE=_TILE, num_warps=8
    )
    kernels.draw_rows[(len(records),)](
        logits, sent, scores, tokens, stride, vocab_size, num_tiles,
        TILE=_TILE, TILES_PAD=power_of_two(num_tiles), num_warps=8,
    )  # fmt: skip
    return tokens


def to_device(numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64, on the device. Enqueues, and does not wait."""
    on_host = torch.tensor(numbers, dtype=torch.int64)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def reading(tokens: Tensor) -> Callable[[], list[int]]:
    """Enqueues a copy of the tokens to the host, on any device. The function that is returned waits for that
    copy alone, not for what is enqueued behind it."""
    if tokens.device.type != "cuda":
        return tokens.tolist
    found = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    found.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tokens.device))

    def read() -> list[int]:
        copied.synchronize()
        return found.tolist()

    return read
