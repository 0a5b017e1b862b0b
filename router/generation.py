"""The G phase of one choice: token events to text, stop strings, usage. Runs on the door's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from cluster.clock import Clock
from cluster.errors import ClusterError
from cluster.types.messages import TokenEvent
from router.answer_text import AnswerText
from router.calls import MediaNote, RankedToken, TextDelta, Usage
from router.dispatcher import TokenStream
from router.parsing.parser import ParsedAnswer
from router.prompt_report import PromptReport
from router.prompts.builder import PreparedPrompt
from router.telemetry.metrics import DoorMetrics
from router.telemetry.timeline import RequestTimeline

if TYPE_CHECKING:
    from router.telemetry.tracing import Tracing

MAX_SCORES = 64  # tokens whose log-probabilities are in one piece: an echoed prompt has those of thousands


class Choice:
    """Iterates over the text of one choice. Closing it, at any time, cancels what still runs."""

    def __init__(
        self,
        prompt: PreparedPrompt,
        tokens: TokenStream,
        text: AnswerText | ParsedAnswer,
        metrics: DoorMetrics,
        clock: Clock,
        timeline: RequestTimeline,
        *,
        keeps_timeline: bool,
        report: PromptReport | None = None,
        tracing: Tracing | None = None,
    ):
        """`timeline`: of the request, on `clock`; its choices share it, one of them keeps it. `tracing`:
        where it goes in the end. `report`: what all of them tell of the prompt."""
        self._prompt = prompt
        self._tokens = tokens
        self._text = text
        self._metrics = metrics
        self._clock = clock
        self.timeline = timeline
        self._keeps_timeline = keeps_timeline
        self._report = report
        self._tracing = tracing
        self._last_at = timeline.arrived_at
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_reasoning_tokens = 0
        self._outcome: str | None = "cancelled"  # what is counted at the end; None once counted

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt.num_tokens,
            completion_tokens=self._num_tokens if self._report is None or self._report.generates else 0,
            cached_tokens=self._num_cached_tokens,
            audio_tokens=self._prompt.num_audio_tokens,
            reasoning_tokens=self._num_reasoning_tokens,
            audio_s=self._prompt.audio_s,
        )

    @property
    def has_next(self) -> bool:
        return self._tokens.has_next

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self._prompt.prompt.token_ids

    @property
    def prompt_logprobs(self) -> Sequence[Sequence[RankedToken] | None]:
        return () if self._report is None else self._report.told

    @property
    def media_notes(self) -> Sequence[MediaNote]:
        return self._prompt.media_notes

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        report = self._report
        try:
            async for event in self._tokens:
                self._measure(event)
                delta = self._text.push(event)
                self._num_reasoning_tokens += delta.num_reasoning_tokens
                if report is not None:
                    delta, report = await report.introduce(event.prompt_logprobs, delta), None
                if delta.finish_reason is not None:
                    self._outcome = delta.finish_reason
                    await self._tokens.aclose()  # a stop string was found here; the pools do not know it
                for idx, piece in enumerate(delta.pieces(MAX_SCORES)):
                    if idx:
                        await asyncio.sleep(0)  # other requests go on
                    yield piece
                if delta.finish_reason is not None:
                    return
        except ClusterError as error:
            self._outcome = type(error).__name__
            raise

    async def aclose(self) -> None:
        await self._tokens.aclose()
        self._prompt.release()
        if self._outcome is not None:
            self._metrics.finished(self._outcome)
            if self._keeps_timeline:
                prompt, num_tokens = self._prompt.num_tokens, self._num_tokens
                self._metrics.observe_ended(self.timeline, self._clock.now(), prompt, num_tokens)
            if self._keeps_timeline and self._tracing is not None:
                self._tracing.ended(self.timeline, self._outcome, self.usage)
            self._outcome = None

    def _measure(self, event: TokenEvent) -> None:
        now = self._clock.now()
        if self._num_tokens == 0:
            self._num_cached_tokens = event.num_cached_tokens
            self._metrics.ttft_s.observe(now - self._last_at)
            self._metrics.prompt_tokens.inc(self._prompt.num_tokens)
            self._metrics.cached_tokens.inc(event.num_cached_tokens)
        else:
            self._metrics.tokens.gap(now - self._last_at)
        if self._keeps_timeline and self.timeline.token(now, event.timing, event.step_s):
            self._metrics.observe_timeline(self.timeline)
        self._last_at = now
        self._num_tokens += len(event.token_ids)
        self._metrics.tokens.num += len(event.token_ids)
