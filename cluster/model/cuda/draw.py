"""Draws on a GPU: one copy to the device and two launches for all rows, whatever their number; two more if
some have filters (for each group of rows, if these are many), and one less if all have. The kernels are those
of `draw_kernels` and `filter_kernels`, which the first call imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from cluster.model.cuda.tiles import power_of_two

GREEDY = -1.0  # as a temperature
# How a row is drawn; see `draw_kernels`. Its size is 4 int64.
RECORD = np.dtype(
    [
        ("key", "<i8"),
        ("top_k", "<i8"),
        ("temperature", "<f4"),
        ("limit", "<f4"),
        ("min_p", "<f4"),
        ("", "<f4"),
    ]
)


@dataclass(frozen=True)
class DrawTiles:
    """How the kernels cut a row: tokens of a tile; parts of a tile, and steps of its scores, that bound top-k
    and top-p; candidates of each tile that are looked at together, to find a boundary and to draw; warps of
    a tile, and of a row, without filters and with."""

    tile: int = 4096
    parts: int = 64
    slots: int = 64
    draw_slots: int = 16
    warps: int = 8
    row_warps: int = 8
    filtered_warps: int = 16


TILES = DrawTiles()
MAX_LISTED = 1 << 24  # places of tokens in scratch, of 8 bytes
_ALIGNED_ROWS = 4  # of so many, each tensor's rows are a multiple of 16 bytes


def draw_tokens(
    logits: Tensor, records: np.ndarray, boundaries: Tensor | None = None, tiles: DrawTiles = TILES
) -> Tensor:
    """[B] int64 token ids, on the device of logits [B, V] float32, whose last dimension is dense. records:
    [B] of `RECORD`. boundaries [B] int64, on the device: takes the place from which on each row with
    filters keeps tokens (see `filter_kernels`). Enqueues, and does not wait."""
    kernels = import_module("cluster.model.cuda.draw_kernels")
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_tiles, stride = -(-vocab_size // tiles.tile), logits.stride(0)
    pad, grid = power_of_two(num_tiles), (num_rows, num_tiles)
    filtered = has_filter(records)
    has_filters = bool(filtered.any())
    sent = _sent(records, device)
    scores = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    masses = parts = scores
    if has_filters:
        masses = torch.empty_like(scores)
        parts = torch.empty(num_rows, num_tiles * tiles.parts, dtype=torch.float32, device=device)
    kernels.tile_scores[grid](
        logits, sent, scores, masses, parts, stride, vocab_size,
        TILE=tiles.tile, PARTS=tiles.parts, FILTERS=has_filters, num_warps=tiles.warps,
    )  # fmt: skip
    if not filtered.all():
        kernels.draw_rows[(num_rows,)](
            logits, sent, scores, tokens, stride, vocab_size, num_tiles,
            TILE=tiles.tile, TILES_PAD=pad, num_warps=tiles.row_warps,
        )  # fmt: skip
    if has_filters:
        boundaries = torch.empty_like(tokens) if boundaries is None else boundaries
        # many rows one group after the other, whose candidates lie in the same place
        most = MAX_LISTED // (num_tiles * tiles.tile)
        group = min(num_rows, max(_ALIGNED_ROWS, most // _ALIGNED_ROWS * _ALIGNED_ROWS))
        listed = torch.empty(group, num_tiles * tiles.tile, dtype=torch.int64, device=device)
        counts = torch.empty(group, num_tiles, dtype=torch.int32, device=device)
        for first in range(0, num_rows, group):
            own = slice(first, first + group)
            _draw_filtered(
                logits[own], sent[own], scores[own], masses[own], parts[own], listed, counts, tokens[own],
                boundaries[own], tiles,
            )  # fmt: skip
    return tokens


def _draw_filtered(
    logits: Tensor, sent: Tensor, scores: Tensor, masses: Tensor, parts: Tensor, listed: Tensor,
    counts: Tensor, tokens: Tensor, boundaries: Tensor, tiles: DrawTiles,
) -> None:  # fmt: skip
    """Tokens and boundaries of these rows, of those that have filters. listed, counts: scratch."""
    filters = import_module("cluster.model.cuda.filter_kernels")
    (num_rows, vocab_size), num_tiles = logits.shape, scores.shape[1]
    pad = power_of_two(num_tiles)
    filters.list_candidates[(num_rows, num_tiles)](
        logits, sent, scores, masses, parts, listed, counts, boundaries, logits.stride(0), vocab_size,
        num_tiles,
        TILE=tiles.tile, TILES_PAD=pad, PARTS=tiles.parts, PARTS_PAD=pad * tiles.parts,
        num_warps=tiles.warps,
    )  # fmt: skip
    filters.draw_filtered[(num_rows,)](
        sent, scores, masses, listed, counts, tokens, boundaries, num_tiles, vocab_size,
        TILE=tiles.tile, TILES_PAD=pad, SLOTS=tiles.slots, DRAW_SLOTS=tiles.draw_slots,
        num_warps=tiles.filtered_warps,
    )  # fmt: skip


def has_filter(records: np.ndarray) -> np.ndarray:
    """[B] bool."""
    filters = (records["top_k"] > 0) | (records["limit"] > 0) | (records["min_p"] > 0)
    return (records["temperature"] >= 0) & filters


def to_device(numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64, on the device. Enqueues, and does not wait."""
    on_host = torch.tensor(numbers, dtype=torch.int64)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def reading(numbers: Tensor) -> Callable[[], np.ndarray]:
    """Enqueues a copy of the numbers to the host, on any device. The function that is returned waits for that
    copy alone, not for what is enqueued behind it."""
    if numbers.device.type != "cuda":
        return numbers.numpy
    found = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    found.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> np.ndarray:
        copied.synchronize()
        return found.numpy()

    return read


def _sent(records: np.ndarray, device: torch.device) -> Tensor:
    """[B, 4] int64, on the device. Enqueues, and does not wait. torch uses pinned memory again that is
    free."""
    words = torch.from_numpy(records.view(np.int64).reshape(-1, 4))
    if device.type != "cuda":
        return words
    pinned = torch.empty(words.shape, dtype=torch.int64, pin_memory=True)
    return pinned.copy_(words).to(device, non_blocking=True)
