"""Tokens of one choice to text: detokenised, cut at stop strings. Log-probabilities go out with the text of
their tokens, however long that is held back, and are dropped with text that a stop string cuts off. Pure; one
object per choice."""

from __future__ import annotations

from collections import deque

from cluster.text.detokenizer import Detokenizer
from cluster.text.pieces import TokenPieces
from cluster.text.stop import StopFilter
from cluster.types.logprobs import TokenLogprobs
from cluster.types.messages import FinishReason, TokenEvent
from router.calls import ScoredToken, TextDelta, TokenScores


class AnswerText:
    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopFilter,
        pieces: TokenPieces,
        *,
        shows_stop_token: bool = False,
        returns_token_ids: bool = False,
        num_before: int = 0,
    ):
        """`shows_stop_token`: the text of the token that ends the answer is part of it. `num_before`:
        characters that the client sees before the answer."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._pieces = pieces
        self._shows_stop_token = shows_stop_token
        self._returns_token_ids = returns_token_ids
        self._num_chars = num_before  # of all text, held back or not
        self._num_out = num_before  # of the text that is out
        self._waiting: deque[tuple[int, TokenScores]] = deque()  # end of the token's text, its scores
        self._silent: list[TokenScores] = []  # of tokens before them, without text of their own

    def push(self, event: TokenEvent) -> TextDelta:
        text, matched = self._stops.push(self._detokenized(event))
        if matched is None and event.finish_reason is not None:
            more, matched = self._stops.push(self._detokenizer.flush())
            text += more
            if matched is None:
                text += self._stops.flush()
        self._num_out += len(text)
        reason = None
        if matched is not None or event.finish_reason in (FinishReason.STOP, FinishReason.COMPLETE):
            reason = "stop"
        elif event.finish_reason is not None:
            reason = "length"
        scores = (
            self._scores_out(is_cut=matched is not None, is_over=reason is not None)
            if self._waiting or self._silent
            else ()
        )
        token_ids = event.token_ids if self._returns_token_ids else ()
        return TextDelta(text, len(event.token_ids), reason, scores, token_ids, stop_string=matched)

    def _detokenized(self, event: TokenEvent) -> str:
        token_ids = event.token_ids
        if event.finish_reason is FinishReason.STOP and not self._shows_stop_token:
            token_ids = token_ids[:-1]
        if not event.logprobs:
            return self._detokenizer.push(token_ids)
        text = ""
        for i, (token_id, logprobs) in enumerate(zip(event.token_ids, event.logprobs, strict=True)):
            scores = self._scores(token_id, logprobs, self._num_chars)
            piece = self._detokenizer.push(token_ids[i : i + 1])
            text += piece
            self._num_chars += len(piece)
            self._waiting.append((self._num_chars, scores))
        return text

    def _scores(self, token_id: int, logprobs: TokenLogprobs, offset: int) -> TokenScores:
        top = zip(logprobs.top_ids, logprobs.top, strict=True)
        return TokenScores(
            ScoredToken(self._pieces.of(token_id), logprobs.drawn),
            tuple(ScoredToken(self._pieces.of(other), logprob) for other, logprob in top),
            offset,
        )

    def _scores_out(self, *, is_cut: bool, is_over: bool) -> tuple[TokenScores, ...]:
        """Returns the scores of the tokens whose text is out. A token without text of its own goes with the
        next that has some: it may be the first part of a character."""
        out: list[TokenScores] = []
        while self._waiting and (is_cut or is_over or self._waiting[0][0] <= self._num_out):
            end, scores = self._waiting.popleft()
            self._silent.append(scores)
            if end > scores.offset:
                out += self._silent
                self._silent = []
        if is_cut:
            return tuple(scores for scores in (*out, *self._silent) if scores.offset < self._num_out)
        return (*out, *self._silent) if is_over else tuple(out)
