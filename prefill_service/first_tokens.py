"""What a door is told when a prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.types.messages import FinishReason, TokenEvent
from cluster.types.request import StopParams
from prefill_service.state import PrefillRequest


def first_events(request: PrefillRequest, token_ids: Sequence[int], now: float) -> list[TokenEvent]:
    """One event per choice, with its first token. The event of choice 0 also tells where the request's time
    went."""
    stop, num_cached = request.request.stop, request.main.num_cached_tokens
    return [
        TokenEvent(
            request.request_id,
            (token_id,),
            _finish_reason(token_id, stop),
            num_cached,
            choice_idx,
            request.stopwatch.timing(now) if choice_idx == 0 else None,
        )
        for choice_idx, token_id in enumerate(token_ids)
    ]


def _finish_reason(token_id: int, stop: StopParams) -> FinishReason | None:
    if token_id in stop.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if stop.max_tokens == 1 else None
