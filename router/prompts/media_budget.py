"""Decides how much each media item is reduced if all items together need more tokens than there is room for.
Pure.

First frames, then resolution:

* All clips lose the same share of their frames, down to `MIN_FRAMES`.
* If that is not enough, all images and frames lose the same share of their pixels, down to
  `MIN_PIXELS_SHARE`.

The shares are as small as possible. Items that do not fit even then are not reduced further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.types.media import MediaProbe, Modality

MIN_FRAMES = 4
MIN_PIXELS_SHARE = 1 / 16  # of the area that the model sees: a quarter of each side
NUM_HALVINGS = 10  # steps of the binary search for a share


class ReductionReason(StrEnum):
    """Why an item was reduced."""

    BUDGET = "budget"  # of the request, the model's context or the operator
    LOAD = "load"  # of the encoders


@dataclass(frozen=True)
class Reduction:
    """What remains of an item; None: everything."""

    max_frames: int | None = None
    max_pixels: int | None = None


# Embedding rows of an item after a reduction; a stronger reduction never gives more
Measure = Callable[[int, Reduction], int]


def fit(probes: Sequence[MediaProbe], max_tokens: int, measure: Measure) -> list[Reduction] | None:
    """Returns one reduction per item, so that all items together have at most `max_tokens` embedding rows.
    None if that is impossible. `probes`: in the sizes that the model sees."""

    def total(reductions: Sequence[Reduction]) -> int:
        return sum(measure(idx, reduction) for idx, reduction in enumerate(reductions))

    whole = [Reduction() for _ in probes]
    if total(whole) <= max_tokens:
        return whole

    def with_frames(share: float) -> list[Reduction]:
        return [Reduction(max_frames=_frames(probe, share)) for probe in probes]

    fewest = with_frames(0.0)
    if total(fewest) <= max_tokens:
        return with_frames(_largest(lambda share: total(with_frames(share)) <= max_tokens, 0.0))

    def with_pixels(share: float) -> list[Reduction]:
        return [
            Reduction(reduction.max_frames, _pixels(probe, share))
            for reduction, probe in zip(fewest, probes, strict=True)
        ]

    if total(with_pixels(MIN_PIXELS_SHARE)) > max_tokens:
        return None
    return with_pixels(_largest(lambda share: total(with_pixels(share)) <= max_tokens, MIN_PIXELS_SHARE))


def load_share(num_queued_rows: float, max_queued_rows: int) -> float:
    """Returns the share of its tokens that new media keeps while so many embedding rows wait at the least
    loaded encoder. It falls with the length of the queue, to a quarter at least."""
    if max_queued_rows == 0 or num_queued_rows <= max_queued_rows:
        return 1.0
    return max(0.25, max_queued_rows / num_queued_rows)


def _frames(probe: MediaProbe, share: float) -> int | None:
    if probe.modality is not Modality.VIDEO or probe.num_frames <= MIN_FRAMES:
        return None
    return max(MIN_FRAMES, int(probe.num_frames * share))


def _pixels(probe: MediaProbe, share: float) -> int | None:
    if probe.modality is Modality.AUDIO:
        return None
    return max(1, int(probe.width * probe.height * share))


def _largest(fits: Callable[[float], bool], low: float) -> float:
    """Returns the largest share in [low, 1] that fits, to the precision of `NUM_HALVINGS`. `low` fits."""
    high = 1.0
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
