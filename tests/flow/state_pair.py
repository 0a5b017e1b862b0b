"""The two places of a sequence's state, for tests that call the model layer themselves."""

from __future__ import annotations

from cluster.model.language import LanguageModel
from cluster.model.states import StateSpan


class StatePair:
    """Its blocks begin at `first_block`; none if the model keeps no state."""

    def __init__(self, language: LanguageModel, first_block: int):
        size = language.state_blocks
        self._before: list[int] = []
        self._after = list(range(first_block, first_block + size))
        self._other = list(range(first_block + size, first_block + 2 * size))

    def of(self, num_tokens: int) -> tuple[StateSpan, ...]:
        """The sequence's next tokens."""
        if not self._after:
            return ()
        span = StateSpan(num_tokens, self._before, self._after)
        self._before, self._after, self._other = self._after, self._other, self._after
        return (span,)
