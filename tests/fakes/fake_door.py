"""A door that says a scripted text, word by word. Implements `DoorProtocol`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from cluster.clock import SystemClock
from cluster.text.defaults import GenerationDefaults
from router.calls import (
    ChatCall,
    CompletionCall,
    MediaNote,
    RankedToken,
    ScoredToken,
    ServedModels,
    TextDelta,
    TokenizeCall,
    Tokenized,
    TokenScores,
    Usage,
)
from router.http.keys import Access, KeyRing
from router.http.limits import Limits


class FakeTimeline:
    def fields(self) -> dict[str, object]:
        return {"ttft_ms": 1.5, "placement": {"decode": "secret-replica"}, "alternatives": ["secret-replica"]}

    def header(self) -> str:
        return "ttft;dur=1.5"


class FakeGeneration:
    timeline = FakeTimeline()
    has_next = False
    prompt_token_ids = (1, 2, 3)
    prompt_logprobs = (None, (RankedToken(2, -0.5, None, "b"), RankedToken(9, -0.25, 1, "\ufffd")), None)

    def __init__(self, door: FakeDoor, words: Sequence[str], call: ChatCall | CompletionCall):
        self._door, self._words, self._call = door, words, call
        self.usage = Usage(prompt_tokens=7, completion_tokens=0, cached_tokens=4)
        self.media_notes = door.media_notes
        self.num_closed = 0

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        for delta in self._door.deltas:
            yield delta
        for idx, word in enumerate(self._words):
            await asyncio.sleep(self._door.pause_s)
            if idx == self._door.hold_at:
                await self._door.may_go_on.wait()
            if idx == self._door.fail_at and self._door.error is not None:
                raise self._door.error
            self.usage = Usage(7, idx + 1, 4, audio_tokens=5, audio_s=2.5)
            reason = self._door.last_reason if idx == len(self._words) - 1 else None
            scores = self._scores(idx) if self._call.num_logprobs is not None else ()
            yield TextDelta(word, 1, reason, scores, (idx,) if self._call.returns_token_ids else ())

    def _scores(self, idx: int) -> tuple[TokenScores, ...]:
        """The token's own, and those of half a character, which has no probability."""
        drawn = ScoredToken(self._words[idx].encode(), -0.5)
        top = (drawn, ScoredToken(b"\xf0\x9f", -float("inf")))
        return (TokenScores(drawn, top[: self._call.num_logprobs], sum(map(len, self._words[:idx]))),)

    async def aclose(self) -> None:
        self.num_closed += 1
        self._door.closed.set()


class FakeAdapters:
    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}

    async def load(self, name: str, path: str) -> None:
        self.loaded[name] = path

    async def unload(self, name: str) -> None:
        self.loaded.pop(name, None)


class FakeDoor:
    models = ServedModels("org/demo")
    created = 1_700_000_000
    transcription_instruction = "Write it down."
    translation_instruction = "Write it down in English."
    defaults = GenerationDefaults(temperature=0.0, max_tokens=64, eos_token_ids=(1014,))
    limits = Limits(max_model_len=4096, vocab_size=2048, max_body_bytes=4 << 20, keep_responses_s=60)

    def __init__(self, words: Sequence[str] = ("Hello", " wör", "ld", "")):
        self.access = Access(KeyRing(None, (), SystemClock()))
        self.adapters = FakeAdapters()
        self.words = words
        self.deltas: Sequence[TextDelta] = ()  # before the words; the last one may end the answer
        self.pause_s = 0.0
        self.start_pause_s = 0.0
        self.hold_at = -1  # word before which a generation waits until it `may_go_on`
        self.may_go_on = asyncio.Event()
        self.media_notes: tuple[MediaNote, ...] = ()
        self.last_reason: Literal["stop", "length"] = "stop"
        self.error: Exception | None = None
        self.fail_at: int | None = -1  # word at which `error` is raised; None: at the call itself
        self.calls: list[ChatCall | CompletionCall | TokenizeCall] = []
        self.generations: list[FakeGeneration] = []
        self.closed = asyncio.Event()
        self.was_cancelled = False
        self.ready = True

    async def chat(self, call: ChatCall) -> list[FakeGeneration]:
        return await self._start(call, len(call.sampling))

    async def complete(self, call: CompletionCall) -> list[FakeGeneration]:
        return await self._start(call, len(call.sampling) * len(call.prompts))

    async def tokenize(self, call: TokenizeCall) -> Tokenized:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return Tokenized([1, 2], ["a", "b"] if call.names else None)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def is_ready(self) -> bool:
        return self.ready

    def pools(self) -> dict[str, Any]:
        return {"num_running": 0, "num_waiting": 0, "pools": [{"role": "decode", "workers": []}]}

    def metrics(self) -> bytes:
        return b"epdg_test 1\n"

    async def _start(self, call: ChatCall | CompletionCall, num: int) -> list[FakeGeneration]:
        self.calls.append(call)
        try:
            await asyncio.sleep(self.start_pause_s)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None and self.fail_at is None:
            raise self.error
        self.generations = [FakeGeneration(self, self.words, call) for _ in range(num)]
        return self.generations
