"""Brings the matrices of a LoRA adapter to a GPU while it computes steps.

All matrices are written into one pinned buffer of the host, in the model's dtype, and go to the device in one
copy for each time that the buffer is full; from there they go to their places in the slots, and what lies
behind an adapter's rank is cleared, in few launches for all of them. All of it is enqueued on a stream of its
own. The thread that calls waits for it, never the one that runs the model, nor its stream: no sequence of a
step has the slot. Both buffers are made while the model is loaded, so an adapter that comes later takes no
memory of the device.

Untried on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.model.cuda.uploads import upload
from cluster.model.slot_matrices import SlotMatrices, SlotPiece, Updates

STAGING_BYTES = 32 << 20  # on the host and on the device. An assumption: some milliseconds of a copy


class AdapterStaging:
    """`write`: one thread at a time."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, largest: int, num_bytes: int = STAGING_BYTES
    ):
        """largest: numbers of the largest matrix."""
        size = max(largest, num_bytes // dtype.itemsize)
        self._host = torch.empty(size, dtype=dtype, pin_memory=True)
        self._device = torch.empty(size, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)

    def write(self, slot: int, stores: Sequence[SlotMatrices], updates: Updates) -> None:
        """Makes what an adapter adds all that the slot has of these modules. Blocks."""
        with torch.cuda.stream(self._stream):
            ranks = np.array([store.rank_of(updates) for store in stores])
            (sent,) = upload([ranks], self._device.device)
            torch._foreach_copy_([store.ranks[slot : slot + 1] for store in stores], list(sent.split(1)))
            pieces, used = [], 0
            for piece in (piece for store in stores for piece in store.pieces(slot, updates)):
                size = len(piece.source) * piece.target.shape[1]
                if used + size > len(self._host):
                    self._send(pieces, used)
                    pieces, used = [], 0
                self._stage(piece, used)
                pieces.append(piece)
                used += size
            self._send(pieces, used)

    def _stage(self, piece: SlotPiece, first: int) -> None:
        rows = _rows(self._host, first, piece)
        into = piece.place_in(rows)
        if into.shape != rows.shape:
            rows.zero_()
        into.copy_(piece.source)

    def _send(self, pieces: Sequence[SlotPiece], used: int) -> None:
        """Waits until the host's buffer may be written again."""
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        staged, first = [], 0
        for piece in pieces:
            staged.append(_rows(self._device, first, piece))
            first += staged[-1].numel()
        filled = [
            (piece.target[: len(rows)], rows) for piece, rows in zip(pieces, staged, strict=True) if len(rows)
        ]
        if filled:
            torch._foreach_copy_([target for target, _ in filled], [rows for _, rows in filled])
        behind = [piece.target[len(piece.source) :] for piece in pieces]
        if behind := [rows for rows in behind if len(rows)]:
            torch._foreach_zero_(behind)
        self._stream.synchronize()


def _rows(buffer: Tensor, first: int, piece: SlotPiece) -> Tensor:
    """[rank, columns]: the place of a piece that begins there."""
    num_rows, width = len(piece.source), piece.target.shape[1]
    return buffer[first : first + num_rows * width].view(num_rows, width)
