"""Events of tokens that are there already are sent together, one event per token, and none waits for more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.clock import SystemClock
from cluster.errors import UnavailableError
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop import StopFilter, StopStrings
from cluster.types.messages import FinishReason, TokenEvent
from router.answer_text import AnswerText
from router.api import serving
from router.api.chat.render import ChatFormat
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.serving import stream
from router.dispatcher import TokenStream
from router.generation import Choice
from router.telemetry.timeline import RequestTimeline
from tests.unit.http.test_body_parser import CONTEXT

DONE = b"data: [DONE]\n\n"


class Owner:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


class Served:
    """A stream of chat events with the choices that it has; the test gives the tokens."""

    def __init__(self, num_choices: int = 1, stop: str = "", **fields: Any):
        asked = {"model": "org/demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        call = chat_call(ChatRequest.model_validate({**asked, "n": num_choices, **fields}), CONTEXT)
        self.owner = Owner()
        self.tokens = [TokenStream(lambda: None, self.owner.close) for _ in range(num_choices)]
        self.choices = [_choice(tokens, stop) for tokens in self.tokens]
        self.pieces: list[bytes] = []
        self._reading = asyncio.ensure_future(self._read(ChatFormat("id", 1, "m", call)))

    async def _read(self, answer: ChatFormat) -> None:
        async def begin() -> Sequence[Choice]:
            return self.choices

        events: AsyncGenerator[bytes, None] = stream(begin, answer)
        async for piece in events:
            self.pieces.append(piece)

    def give(self, *token_ids: int, choice_idx: int = 0, ends: bool = False) -> None:
        """One event for each token, as so many steps of a worker bring them."""
        for idx, token_id in enumerate(token_ids):
            is_last = ends and idx == len(token_ids) - 1
            reason = FinishReason.LENGTH if is_last else None
            self.tokens[choice_idx].put(TokenEvent("r", (token_id,), reason, choice_idx=choice_idx))

    async def taken(self) -> list[bytes]:
        """What has been sent since the last call."""
        for _ in range(20):
            await asyncio.sleep(0)
        pieces, self.pieces = self.pieces, []
        return pieces

    async def ended(self) -> list[bytes]:
        await self._reading
        return self.pieces


def _choice(tokens: TokenStream, stop: str) -> Choice:
    metrics: Any = SimpleNamespace(finished=lambda outcome: None, tokens=SimpleNamespace(num=0))
    metrics.tokens.gap = lambda seconds: None
    for name in ("ttft_s", "prompt_tokens", "cached_tokens"):
        setattr(metrics, name, SimpleNamespace(observe=lambda value: None, inc=lambda value: None))
    prompt: Any = SimpleNamespace(
        num_tokens=3, num_audio_tokens=0, audio_s=0.0, media_notes=(), release=lambda: None
    )
    pieces: Any = None
    detokenizer = Detokenizer(lambda ids: "".join(f" {token_id}" for token_id in ids), ())
    text = AnswerText(detokenizer, StopFilter(StopStrings((stop,) if stop else ())), pieces)
    return Choice(prompt, tokens, text, metrics, SystemClock(), RequestTimeline(0.0), keeps_timeline=False)


def contents(piece: bytes) -> list[str]:
    """The text of each event that has some."""
    events = [json.loads(event[6:]) for event in piece.split(b"\n\n") if event not in (b"", b"data: [DONE]")]
    texts = (choice["delta"].get("content") for event in events for choice in event["choices"])
    return [text for text in texts if text]


async def test_a_step_is_one_write_and_steps_that_wait_are_one_together():
    served = Served()
    served.give(1)
    assert [contents(piece) for piece in await served.taken()] == [[" 1"]]
    served.give(2)
    assert [contents(piece) for piece in await served.taken()] == [[" 2"]]
    served.give(3, 4, 5)
    assert [contents(piece) for piece in await served.taken()] == [[" 3", " 4", " 5"]]
    served.give(6, 7, ends=True)
    assert [contents(piece) for piece in await served.ended()] == [[" 6", " 7"], []]
    assert served.owner.num_closed == 1


@pytest.mark.parametrize(
    "fields", [{}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]
)
async def test_the_bytes_are_those_of_events_that_come_one_by_one(fields: dict[str, Any]):
    together, alone = Served(**fields), Served(**fields)
    together.give(*range(1, 10), ends=True)
    single: list[bytes] = []
    for token_id in range(1, 10):
        alone.give(token_id, ends=token_id == 9)
        single += await alone.taken()
    joined = await together.ended()
    assert b"".join(joined) == b"".join(single) and len(joined) == 2 < len(single)
    assert b"".join(joined).endswith(DONE)


async def test_a_write_is_bounded_however_many_tokens_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "MAX_WRITE_BYTES", 1000)
    served = Served()
    served.give(*range(100), ends=True)
    pieces = await served.ended()
    assert [text for piece in pieces for text in contents(piece)] == [f" {idx}" for idx in range(100)]
    longest = max(len(event) for piece in pieces for event in piece.split(b"\n\n"))
    assert max(map(len, pieces)) < 1000 + 3 * longest and len(pieces) > 10


async def test_text_before_an_error_is_sent():
    served = Served()
    served.give(1, 2)
    served.tokens[0].put(UnavailableError("lost"))
    with pytest.raises(UnavailableError):
        await served.ended()
    assert [contents(piece) for piece in served.pieces] == [[" 1", " 2"]]


async def test_the_end_at_a_stop_string_is_sent_though_tokens_wait():
    """Another choice goes on: nothing of the first one may wait for it."""
    served = Served(num_choices=2, stop=" 2")
    served.give(1, 2, 3, 4)
    assert b'"finish_reason":"stop"' in b"".join(await served.taken())
    served.give(1, choice_idx=1, ends=True)
    assert b'"index":1' in b"".join(await served.ended())


async def test_a_choice_does_not_wait_for_another():
    served = Served(num_choices=2)
    served.give(1, choice_idx=0)
    assert [contents(piece) for piece in await served.taken()] == [[" 1"]]
    served.give(2, 3, choice_idx=1)
    assert [text for piece in await served.taken() for text in contents(piece)] == [" 2", " 3"]
    for idx in (0, 1):
        served.give(9, choice_idx=idx, ends=True)
    await served.ended()
