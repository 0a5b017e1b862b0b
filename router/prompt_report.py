"""What an answer tells of its prompt: its text (`echo`), and the log-probabilities of its tokens.

One object for all choices of a prompt. The worker's log-probabilities come with the first token; they are
read once, on a thread, because a prompt may be long. A prompt's first token has no log-probability, and what
stands for media is no text: no model predicts it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from cluster.text.echo import EchoedPrompt
from cluster.text.pieces import TokenPieces
from cluster.types.logprobs import TokenLogprobs
from cluster.types.request import Prompt
from router.calls import RankedToken, ScoredToken, TextDelta, TokenScores


class PromptReport:
    def __init__(
        self,
        prompt: Prompt,
        pieces: TokenPieces,
        off_loop: Callable[..., Awaitable[None]],
        *,
        num_told: int | None = None,
        echo: EchoedPrompt | None = None,
        num_echoed: int | None = None,
        generates: bool = True,
    ):
        """`off_loop(function, argument)`: calls it on a thread. `num_told`: how many tokens at each position
        are reported beside the prompt's own; `num_echoed`: the same as a part of the answer; None: none at
        all. `generates`: False: the answer is the prompt."""
        self._prompt = prompt
        self._pieces = pieces
        self._off_loop = off_loop
        self._num_told = num_told
        self._echo = echo
        self._num_echoed = num_echoed
        self._is_read = num_told is None and num_echoed is None
        self._scores: tuple[TokenScores, ...] = ()  # of the echoed prompt
        self.generates = generates
        # At each position the prompt's own token and the most probable ones; None: not known
        self.told: Sequence[Sequence[RankedToken] | None] = ()

    @property
    def num_chars(self) -> int:
        """Characters of the answer before what is generated."""
        return 0 if self._echo is None else len(self._echo.text)

    async def introduce(self, logprobs: Sequence[TokenLogprobs], delta: TextDelta) -> TextDelta:
        """The first piece of a choice, with the prompt before it. `logprobs`: as they came with it."""
        if not self._is_read:
            await self._off_loop(self._read, logprobs)
        if not self.generates:
            delta = TextDelta("", 0, "length")
        if self._echo is None:
            return delta
        return msgspec.structs.replace(
            delta, text=self._echo.text + delta.text, scores=(*self._scores, *delta.scores)
        )

    def _read(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """May be repeated."""
        token_ids = self._prompt.token_ids
        found = zip(self._prompt.text_indices(1, len(token_ids)), logprobs, strict=True)
        known: list[TokenLogprobs | None] = [None] * len(token_ids)
        for idx, each in found:
            known[idx] = each
        if self._num_told is not None:
            self.told = [
                None if each is None else self._ranked(token_id, each, self._num_told)
                for token_id, each in zip(token_ids, known, strict=True)
            ]
        if self._echo is not None and self._num_echoed is not None:
            self._scores = tuple(map(self._scored, token_ids, known, self._echo.offsets))
        self._is_read = True

    def _scored(self, token_id: int, known: TokenLogprobs | None, offset: int) -> TokenScores:
        piece = self._pieces.of(token_id)
        if known is None:
            return TokenScores(ScoredToken(piece, None), (), offset)
        top = zip(known.top_ids[: self._num_echoed], known.top, strict=False)
        others = tuple(ScoredToken(self._pieces.of(other), logprob) for other, logprob in top)
        return TokenScores(ScoredToken(piece, known.drawn), others, offset)

    def _ranked(self, token_id: int, known: TokenLogprobs, num_top: int) -> tuple[RankedToken, ...]:
        top = dict(zip(known.top_ids, known.top, strict=True))
        ranks = {other: rank for rank, other in enumerate(top, 1)}
        others = [other for other in known.top_ids[:num_top] if other != token_id]
        return tuple(
            RankedToken(
                each,
                known.drawn if each == token_id else top[each],
                ranks.get(each),
                self._pieces.of(each).decode(errors="replace"),
            )
            for each in (token_id, *others)
        )
