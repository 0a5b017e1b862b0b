"""How much of each media item is looked at when all together cost more tokens than there is room for. Pure.

The policy: first frames, then resolution. All clips lose the same share of their frames, down to `MIN_FRAMES`; if that is
not enough, all images and frames lose the same share of their pixels, down to `MIN_PIXELS_SHARE`. As little as possible is taken. What
then still does not fit does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.types.media import MediaProbe, Modality

MIN_FRAMES = 4
MIN_PIXELS_SHARE = 1 / 16  # of the area that the model sees: a quarter of each side
NUM_HALVINGS = 10  # of the interval in which a share is looked for


class ReductionReason(StrEnum):
    """Why an item was reduced."""

    BUDGET = "budget"  # of the request, the model's context or the operator
    LOAD = "load"  # of the encoders


@dataclass(frozen=True)
class Reduction:
    """What is left of an item; None: all of it."""

    max_frames: int | None = None
    max_pixels: int | None = None


Measure = Callable[
    [int, Reduction], int
]  # embedding rows of an item after a reduction; never more after a deeper one


def fit(probes: Sequence[MediaProbe], max_tokens: int, measure: Measure) -> list[Reduction] | None:
    """One reduction per item, so that all together have at most `max_tokens` embedding rows. None if no reductions do that. `probes`: of the
    sizes in which the model sees the items."""

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


def load_share(num_queued_rows: int, max_queued_rows: int) -> float:
    """Which share of its tokens media keeps while so many embedding rows wait at the least loaded encoder: less the longer
    the queue, a quarter at least."""
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
    """The largest share in [low, 1] that fits, as far as some halvings find it; `low` does."""
    high = 1.0
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
