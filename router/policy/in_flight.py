"""What a door remembers of its own requests from the decision to their end, and what a first token teaches:
the actual durations of one request against its prediction, given to the calibration.

A worker's own duration shows its speed only if the work was alone there: if it waited no longer than
`ALONE_RATIO` of its own duration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.types.members import Phase, Role
from cluster.types.timings import EncodeTiming, PrefillTiming
from router.policy.calibration import Calibration, Kind
from router.policy.pool import Charge
from router.policy.views import ItemView, Placement, Prediction, RequestView

ALONE_RATIO = 0.1

# A worker's role in a phase, and its hardware; None: it is gone
HardwareOf = Callable[[Phase, str], tuple[Role, str] | None]


@dataclass(eq=False, slots=True)
class InFlightItem:
    """One media item of an in-flight request."""

    view: ItemView
    encoder: str
    charge: Charge | None  # None: the encoder had the item already, or is done with it


@dataclass(eq=False, slots=True, kw_only=True)
class InFlightRequest:
    """A request of this door."""

    request: RequestView
    placement: Placement
    prediction: Prediction
    started_at: float
    residual: float  # corrections that the prediction contains
    kind: Kind
    prefill_factor: float
    encode_factors: tuple[float, ...]
    work: Charge  # at the worker that computes the prompt
    decode: Charge
    items: list[InFlightItem]
    expected: Sequence[bytes]  # hashes of the blocks that the worker will have


def num_early_tokens(
    request: RequestView, prediction: Prediction, num_tokens: float, num_cached: int
) -> float:
    """Counts those of the tokens to compute that come before the first item whose embeddings still have to
    arrive."""
    coming = [
        item.start
        for item, predicted in zip(request.media, prediction.items, strict=True)
        if predicted.arrival_s > 0
    ]
    return max(0.0, min(coming) - num_cached) + request.num_negative_tokens if coming else num_tokens


def learn(
    calibration: Calibration,
    in_flight: InFlightRequest,
    ttft_s: float,
    media: Sequence[EncodeTiming | None],
    prefill: PrefillTiming | None,
    hardware_of: HardwareOf,
) -> None:
    """`ttft_s`: from the decision to the first token. `media`: per item; None: no encoder worked on it."""
    predicted = in_flight.prediction
    calibration.observe_ttft(
        in_flight.kind, ttft_s, predicted.ttft_s, in_flight.residual, (predicted.low_s, predicted.high_s)
    )
    if prefill is not None:
        _learn_prefill(calibration, in_flight, ttft_s, prefill, hardware_of)
    for item, timing, factor, expected in zip(
        in_flight.items, media, in_flight.encode_factors, predicted.items, strict=False
    ):
        worker = hardware_of(Phase.ENCODE, item.encoder)
        if timing is None or worker is None:
            continue
        actual_s = timing.preparing_s + timing.encoding_s
        num_there = sum(other.encoder == item.encoder for other in in_flight.items)
        if num_there == 1 and timing.queued_s + expected.queue_s <= ALONE_RATIO * actual_s:
            calibration.observe_phase(*worker, actual_s, expected.encode_s / factor)


def _learn_prefill(
    calibration: Calibration,
    in_flight: InFlightRequest,
    ttft_s: float,
    timing: PrefillTiming,
    hardware_of: HardwareOf,
) -> None:
    waited_s = timing.blocks_s + timing.media_s + timing.queued_s
    calibration.observe_overhead(ttft_s - waited_s - timing.computing_s)
    worker = hardware_of(Phase.PREFILL, in_flight.placement.prefill)
    if worker is None or in_flight.request.media or waited_s > ALONE_RATIO * timing.computing_s:
        return
    uncorrected_s = in_flight.prediction.prefill_s / (in_flight.residual * in_flight.prefill_factor)
    calibration.observe_phase(*worker, timing.computing_s, uncorrected_s)
