"""Which items share an encoder call, and how much of an item one call computes. Pure.

When the device is free, a call starts at once; there is no timer. The most urgent item that can run chooses
the modality. Other items of that modality join in order, as long as that is worth it by the device's own fit,
and until the budget of rows, bytes or items is used up.

An item that is larger than a call may be is computed in pieces, one call each. A piece runs alone. Between
two pieces, more urgent items run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.scheduling.keys import OrderKey
from cluster.types.media import Modality


@dataclass(frozen=True)
class Candidate:
    """The next call of one item."""

    media_hash: str
    order: OrderKey
    modality: Modality
    num_rows: int  # embedding rows that the encoder computes in this call, before pooling
    num_bytes: int  # estimated bytes of this call
    num_blocks: int = 0  # cache blocks that the item has still to be given
    runs_alone: bool = False


@dataclass(frozen=True)
class CallLimits:
    """Limits of one encoder call. A single item may exceed rows and bytes."""

    max_items: int
    max_rows: int
    max_bytes: int
    # rows of a modality's call → how many of so many that are ready it should have
    rows_of_a_batch: Callable[[Modality, int], float] = lambda modality, num_ready: math.inf


def select_batch(ready: Iterable[Candidate], limits: CallLimits, num_free_blocks: int) -> list[Candidate]:
    """The most urgent items first. If an item gets no room in the cache, no later item gets room: what
    holds the room is being sent or encoded and will be free, so a large item is not delayed for ever."""
    batch: list[Candidate] = []
    num_rows = num_bytes = 0
    wanted_rows = math.inf
    candidates = sorted(ready, key=lambda c: c.order)
    for candidate in candidates:
        if candidate.num_blocks > num_free_blocks:
            num_free_blocks = 0
            continue
        if batch and candidate.modality is not batch[0].modality:
            continue
        if not batch:
            num_ready = sum(c.num_rows for c in candidates if c.modality is candidate.modality)
            wanted_rows = limits.rows_of_a_batch(candidate.modality, num_ready)
        num_rows += candidate.num_rows
        num_bytes += candidate.num_bytes
        is_full = (
            len(batch) == limits.max_items
            or num_rows - candidate.num_rows / 2 > wanted_rows  # the nearest number of items
            or num_rows > limits.max_rows
            or num_bytes > limits.max_bytes
        )
        if batch and (candidate.runs_alone or is_full):
            break
        batch.append(candidate)
        if candidate.runs_alone:
            break
        num_free_blocks -= candidate.num_blocks
    return batch


def units_per_call(
    num_units: int, num_rows: int, num_bytes: int, max_rows: float, max_bytes: int, multiple: int = 1
) -> int:
    """How many equal units of an item (temporal patches, frames, tiles) one call computes.

    num_rows, num_bytes: of a call with all units. The answer is `num_units`, or a multiple of `multiple`
    (units that become one row together): the largest one within the limits, and at least one multiple."""
    share = min(max_rows / num_rows, max_bytes / max(1, num_bytes))
    if share >= 1:
        return num_units
    return min(num_units, max(multiple, int(num_units * share) // multiple * multiple))
