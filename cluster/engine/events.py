"""What a door is told when a prompt has been computed."""

from __future__ import annotations

from cluster.engine.state import FirstTokens, LanguageRequest
from cluster.types.messages import TokenEvent


def first_events(request: LanguageRequest, first: FirstTokens, now: float) -> list[TokenEvent]:
    """One event per choice, with its first token. The event of choice 0 also tells where the request's time
    went, that of the first choice that is read the log-probabilities of the prompt."""
    teller = next((choice.idx for choice in request.choices if not choice.is_done), 0)
    prompt_logprobs = tuple(request.main.prompt_logprobs)
    return [
        TokenEvent(
            request.request_id,
            (token_id,),
            first.finish_reason(choice_idx, request.request.stop),
            request.main.num_cached_tokens,
            choice_idx,
            request.stopwatch.timing(now) if choice_idx == 0 else None,
            logprobs=first.logprobs[choice_idx : choice_idx + 1],
            prompt_logprobs=prompt_logprobs if choice_idx == teller else (),
        )
        for choice_idx, token_id in enumerate(first.token_ids)
    ]
