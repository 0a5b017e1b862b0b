"""Log-probabilities on their way from a worker to a door, with the tokens that they belong to."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities at one position."""

    drawn: float  # of the token that was drawn, or stands there in the prompt
    top_ids: tuple[int, ...] = ()  # the most probable tokens, as many as the request wants …
    top: tuple[float, ...] = ()  # … and theirs
