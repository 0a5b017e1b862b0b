"""What the draw of one choice's tokens depends on beside logits and sampling parameters: the tokens so far,
counted and matched as its request asks.

A state is made from the prompt and the generated tokens when the choice is first drawn here, and is told each
token that the choice gets. So it is the same on every worker, and behind a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Protocol, TypeVar

import numpy as np

from cluster.errors import RequestError
from cluster.model.token_counts import TokenCounts
from cluster.text.sequences import START, SequenceAutomaton
from cluster.types.request import GenerateRequest, LogitChanges

NO_CHANGES = LogitChanges()


class Constraint(Protocol):
    """Which tokens may come next in one choice, by the tokens before them: the state of a grammar."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """The choice has got this token."""
        ...

    def completes(self, token_id: int) -> bool:
        """Whether it is complete with this token. Changes nothing."""
        ...

    def drafts(self, guessed: Sequence[int], limit: int) -> list[int]:
        """The tokens that follow for certain, if there are any, at most `limit`. Otherwise the longest prefix
        of the guessed ones that may come. May be none."""
        ...


_Constraint = TypeVar("_Constraint", bound=Constraint)


class ConstraintMasks(Protocol[_Constraint]):
    """Makes constraints, of one class, and fills their masks. In each step: `may_draw`, `start`, the forward,
    `take`. A step that fails is repeated from `start`, and nothing of the failed one is taken.

    A mask may be late. Then its choice gets no token in this step, and no step has it until the mask is
    there: the tokens are the same, and other requests do not wait."""

    def constraint(self, request: GenerateRequest, generated: Sequence[int]) -> _Constraint | None:
        """Returns the constraint of a choice that has these tokens already. None: any token may come."""
        ...

    def may_draw(self, constraint: _Constraint, /) -> bool:
        """Whether the next step can draw for it. If not, the engine's thread is called when that changes.
        Raises what ends its request."""
        ...

    def start(self, wanted: Sequence[tuple[_Constraint, Sequence[int]]]) -> None:
        """Masks are wanted of these constraints: of each as it is, and with each of its drafts behind it.
        Should not wait; may fill them on another thread while the forward runs."""
        ...

    def take(self) -> tuple[np.ndarray, frozenset[int]]:
        """[masks, words] int32: 1 + number of drafts for each constraint, in the order of `start`. Token t
        may be drawn if bit t % 32 of word t // 32 is set. Nothing is drawn from masks behind a draft that may
        not come. And the indices of constraints whose masks are late. Waits for a moment only."""
        ...


class DrawState:
    def __init__(self, request: GenerateRequest, generated: Sequence[int], masks: ConstraintMasks | None):
        """`generated`: tokens of the choice, those of earlier attempts included."""
        self.request = request
        self.changes = changes = request.changes or NO_CHANGES
        self.constraint = None if masks is None else masks.constraint(request, generated)
        self.bias = (
            np.array([token_id for token_id, _ in changes.bias], dtype=np.int64),
            np.array([added for _, added in changes.bias], dtype=np.float32),
        )
        self.allowed = np.array(changes.allowed_token_ids, dtype=np.int64)
        self._may_come = frozenset(changes.allowed_token_ids)
        self.counts: TokenCounts | None = None
        if changes.counts_tokens:
            prompt = request.prompt
            seen = prompt.token_ids[: prompt.num_asked] if changes.repetition_penalty != 1 else ()
            self.counts = TokenCounts(seen, generated)
        # The beginnings of bad words, all tokens but the last, and where the answer stands in them
        self._bad_starts = _starts(changes.bad_words) if changes.bad_words else None
        self._bad_node = (
            START if self._bad_starts is None else reduce(self._bad_starts.step, generated, START)
        )

    def accept(self, token_id: int) -> bool:
        """The choice has got this token. Returns whether its constraint is complete with it. Raises
        RequestError if no token was left to draw."""
        self._check(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self._bad_starts is not None:
            self._bad_node = self._bad_starts.step(self._bad_node, token_id)
        return self.constraint is not None and self.constraint.is_complete

    def completes(self, token_id: int) -> bool:
        """Whether its constraint is complete with this token. Changes nothing. Raises as `accept` does."""
        self._check(token_id)
        return self.constraint is not None and self.constraint.completes(token_id)

    def _check(self, token_id: int) -> None:
        """Raises RequestError if this token was drawn because all that are allowed are forbidden: of a row of
        -inf a draw gives the first token."""
        if self._may_come and token_id not in self._may_come:
            raise RequestError(
                "allowed_token_ids: the other fields of the request forbid all of them here",
                param="allowed_token_ids",
            )

    def forbidden(self, num_generated: int, drafts: Sequence[int]) -> list[int]:
        """Tokens that may not come behind these drafts: ends of bad words, and stop tokens before
        `min_tokens`. `num_generated`: tokens of this attempt before the drafts.

        Bad words cost as many steps as there are drafts and tokens found, however many words there are. A
        draft with which the answer leaves a word costs at most one step for each token of that word."""
        stop = self.request.stop
        found = [*stop.stop_token_ids] if num_generated + len(drafts) < stop.min_tokens else []
        if self._bad_starts is not None:
            node = reduce(self._bad_starts.step, drafts, self._bad_node)
            found += [self.changes.bad_words[i][-1] for i in self._bad_starts.matches(node)]
        return found


@lru_cache(maxsize=8)  # for the choices of a request, which begin together
def _starts(bad_words: tuple[tuple[int, ...], ...]) -> SequenceAutomaton:
    return SequenceAutomaton([word[:-1] for word in bad_words])
