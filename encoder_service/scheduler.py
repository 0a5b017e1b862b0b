"""Which items share an encoder batch. Pure.

Whatever is ready when the device is free runs, oldest first, no timer: the oldest item chooses the modality, others of
that modality join in order of arrival while the row budget lasts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.types.media import Modality


@dataclass(frozen=True)
class Candidate:
    media_hash: str
    modality: Modality
    num_rows: int  # embedding rows


def select_batch(ready: Iterable[Candidate], max_rows: int, max_items: int) -> list[Candidate]:
    """At most `max_items` items and `max_rows` rows; one item larger than that runs alone."""
    batch: list[Candidate] = []
    num_rows = 0
    for candidate in ready:
        if batch and candidate.modality is not batch[0].modality:
            continue
        if batch and (num_rows + candidate.num_rows > max_rows or len(batch) == max_items):
            break
        batch.append(candidate)
        num_rows += candidate.num_rows
    return batch
