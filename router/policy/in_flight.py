"""What a door remembers of its own requests from the decision to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policy.calibration import Kind
from router.policy.pool import Charge
from router.policy.views import ItemView, Placement, Prediction, RequestView


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


def kind_of(request: RequestView, is_shared: bool, media_s: float) -> Kind:
    """The kind of a placement's prediction. `is_shared`: the worker that computes the prompt decodes, too."""
    if media_s > 0:
        return Kind.AWAITED
    if is_shared:
        return Kind.BESIDE_ANSWERS
    return Kind.COMPUTED if request.media else Kind.TEXT
