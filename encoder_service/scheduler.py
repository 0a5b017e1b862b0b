"""Which items share an encoder call, and how much of an item one call computes. Pure.

Whatever is ready when the device is free runs, no timer: the most urgent item that can run chooses the modality, others of
that modality join in order while the budgets of rows, bytes and items last.

An item larger than a call may be is computed in pieces, one call each. A piece runs alone, and between two of them
whoever is more urgent runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.scheduling.keys import OrderKey
from cluster.types.media import Modality


@dataclass(frozen=True)
class Candidate:
    """One item's next call."""

    media_hash: str
    order: OrderKey
    modality: Modality
    num_rows: int  # that the encoder computes in this call, before pooling
    num_bytes: int  # that it is estimated to need for that
    num_blocks: int = 0  # of the cache that the item has still to be given
    runs_alone: bool = False


@dataclass(frozen=True)
class CallLimits:
    """Of one encoder call. A single item may exceed rows and bytes."""

    max_items: int
    max_rows: int
    max_bytes: int


def select_batch(ready: Iterable[Candidate], limits: CallLimits, num_free_blocks: int) -> list[Candidate]:
    """The most urgent first. Where one gets no room in the cache nobody behind it is given any: what holds the room is
    being sent or encoded and will be free, and a large item gets its turn."""
    batch: list[Candidate] = []
    num_rows = num_bytes = 0
    for candidate in sorted(ready, key=lambda c: c.order):
        if candidate.num_blocks > num_free_blocks:
            num_free_blocks = 0
            continue
        if batch and candidate.modality is not batch[0].modality:
            continue
        num_rows += candidate.num_rows
        num_bytes += candidate.num_bytes
        is_full = len(batch) == limits.max_items or num_rows > limits.max_rows or num_bytes > limits.max_bytes
        if batch and (candidate.runs_alone or is_full):
            break
        batch.append(candidate)
        if candidate.runs_alone:
            break
        num_free_blocks -= candidate.num_blocks
    return batch


def units_per_call(
    num_units: int, num_rows: int, num_bytes: int, max_rows: int, max_bytes: int, multiple: int = 1
) -> int:
    """How many of an item's equal units (temporal patches, frames, tiles) one call computes.

    num_rows, num_bytes: of a call with all of them. The answer is `num_units`, or else a multiple of `multiple` (units
    that become one row together), as large as the limits allow and at least one multiple."""
    share = min(max_rows / num_rows, max_bytes / max(1, num_bytes))
    if share >= 1:
        return num_units
    return min(num_units, max(multiple, int(num_units * share) // multiple * multiple))
