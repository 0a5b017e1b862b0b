"""Large answers are written in pieces: the bytes are those of the whole, and between two pieces the event
loop goes on. Work is counted, not timed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.clock import SystemClock
from router.api.anthropic.render import MessageFormat
from router.api.chat.render import ChatFormat, CompletionFormat, WholeChoice
from router.api.chat.schema import ChatRequest, CompletionRequest
from router.api.chat.translate import chat_call, completion_call
from router.api.responses.render import ResponsesFormat
from router.api.responses.schema import ResponsesRequest
from router.api.serving import AnswerFormat, whole
from router.calls import RankedToken, ScoredToken, TextDelta, TokenScores, ToolCallDelta, Usage
from router.generation import MAX_SCORES, Choice
from router.http.pieces import MAX_ITEMS, Many, json_bytes, json_pieces
from router.telemetry.timeline import RequestTimeline
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_responses import of_responses
from tests.unit.http.test_body_parser import CONTEXT

NUM_TOKENS, NUM_TOP = 1000, 3
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(VALUES, st.integers(0, 3 * MAX_ITEMS), st.integers(0, 3))
def test_pieces_are_the_bytes_of_the_whole(value, num_items, num_choices):
    items = list(range(num_items))
    plain = {
        "choices": [{"i": idx, "v": value, "m": [value] * num_items} for idx in range(num_choices)],
        "rest": {"m": items, "v": value, "none": {}},
    }
    lazy = {
        "choices": ({"i": idx, "v": value, "m": Many(lambda _: value, items)} for idx in range(num_choices)),
        "rest": {"m": Many(lambda item: item, items), "v": value, "none": {}},
    }
    assert json_bytes(lazy) == msgspec.json.encode(plain)


def test_a_small_value_is_one_piece_and_a_large_one_has_bounded_ones():
    for num_items in (0, 1, MAX_ITEMS):
        value = {"a": [{"b": Many(str, range(num_items))}, 1]}["a"][0]
        assert len(list(json_pieces({"a": value, "c": 1}))) == 1
    pieces = list(json_pieces({"a": Many(lambda _: 7, range(10 * MAX_ITEMS))}))
    assert len(pieces) == 10 and max(map(len, pieces)) < 2 * MAX_ITEMS + 16


class Work:
    """Entries that were made, and how many at once while the loop had to wait."""

    def __init__(self) -> None:
        self.num_made = 0
        self.most_at_once = 0

    def counted(self, what: Any) -> Any:
        """Counts each read of it."""
        return _Counted(what, self)

    async def watch(self) -> None:
        """Has its turn whenever the loop goes on."""
        seen = self.num_made
        while True:
            await asyncio.sleep(0)
            self.most_at_once = max(self.most_at_once, self.num_made - seen)
            seen = self.num_made


class _Counted:
    def __init__(self, what: Any, work: Work):
        self._what, self._work = what, work

    def __getattr__(self, name: str) -> Any:
        self._work.num_made += name in ("drawn", "logprob", "reasoning")
        return getattr(self._what, name)


def scores_of(num_tokens: int, begin: int = 0) -> list[TokenScores]:
    return [
        TokenScores(
            ScoredToken(f"t{idx}".encode(), -0.5),
            tuple(ScoredToken(f"t{idx}x{other}".encode(), -1.0) for other in range(NUM_TOP)),
            idx,
        )
        for idx in range(begin, begin + num_tokens)
    ]


class Told:
    """A generation whose deltas are given."""

    media_notes = ()
    timeline = None

    def __init__(self, deltas: Sequence[Any], prompt_logprobs: Sequence[Any] = ()):
        self._deltas = deltas
        self.prompt_token_ids = tuple(range(len(prompt_logprobs)))
        self.prompt_logprobs = prompt_logprobs
        self.usage = Usage(7, len(deltas))

    async def __aiter__(self) -> AsyncIterator[Any]:
        for delta in self._deltas:
            await asyncio.sleep(0)
            yield delta

    async def aclose(self) -> None:
        pass


def chat_format() -> AnswerFormat:
    fields = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": NUM_TOP}
    asked = ChatRequest.model_validate({"model": "org/demo", "prompt_logprobs": 3, **fields})
    return ChatFormat("id", 1, "m", chat_call(asked, CONTEXT))


def completion_format() -> AnswerFormat:
    fields = {"prompt": ["a", "b"], "logprobs": NUM_TOP, "prompt_logprobs": 3, "echo": True}
    asked = CompletionRequest.model_validate({"model": "org/demo", **fields})
    return CompletionFormat("id", 1, "m", completion_call(asked, CONTEXT))


def responses_format() -> AnswerFormat:
    return ResponsesFormat("resp_1", 1, ResponsesRequest(model="m", input="hi"), of_responses(input="hi"))


def message_format() -> AnswerFormat:
    return MessageFormat("msg_1", "m")


async def answered(answer: AnswerFormat, generations: Sequence[Told], work: Work) -> dict[str, Any]:
    async def start() -> Any:
        return generations

    watching = asyncio.ensure_future(work.watch())
    body = await whole(start, answer)
    await asyncio.sleep(0)  # it sees the last work, too
    watching.cancel()
    return json.loads(body)


def deltas_of(work: Work) -> list[Any]:
    """Of an answer, one for each token."""
    deltas = [TextDelta("t", 1, None, (work.counted(each),)) for each in scores_of(NUM_TOKENS)]
    return [*deltas, TextDelta("", 0, "stop")]


@pytest.mark.parametrize("make", [chat_format, completion_format, responses_format])
async def test_the_loop_goes_on_while_log_probabilities_are_written(make: Callable[[], AnswerFormat]):
    work = Work()
    num_choices = 1 if make is responses_format else 4
    body = await answered(make(), [Told(deltas_of(work)) for _ in range(num_choices)], work)
    assert str(body).count(f"t{NUM_TOKENS - 1}x{NUM_TOP - 1}") == num_choices
    assert work.num_made >= num_choices * NUM_TOKENS
    assert work.most_at_once <= 4 * MAX_ITEMS


@pytest.mark.parametrize("make", [chat_format, completion_format])
async def test_the_loop_goes_on_while_log_probabilities_of_prompts_are_written(make):
    work = Work()
    num_prompts = 1 if make is chat_format else 5
    ranked = [None, *(tuple(RankedToken(idx, -1.0, idx, str(idx)) for idx in range(4)) for _ in range(999))]
    counted = [each and tuple(map(work.counted, each)) for each in ranked]
    generations = [Told([TextDelta("a", 1, "stop")], counted) for _ in range(num_prompts)]
    body = await answered(make(), generations, work)
    told = [body] if make is chat_format else body["choices"]
    assert [len(each["prompt_logprobs"]) for each in told] == [1000] * num_prompts
    assert told[0]["prompt_logprobs"][5]["2"] == {"logprob": -1.0, "rank": 2, "decoded_token": "2"}
    assert work.num_made == num_prompts * 999 * 4
    assert work.most_at_once <= 2 * MAX_ITEMS * 4  # the end of one choice and the beginning of the next


@pytest.mark.parametrize("make", [message_format, responses_format])
async def test_the_loop_goes_on_while_many_deltas_become_one_answer(make):
    work = Work()
    deltas = [work.counted(TextDelta(f"{idx} ", 1)) for idx in range(NUM_TOKENS)]
    body = await answered(make(), [Told([*deltas, TextDelta("", 0, "stop")])], work)
    content = body["content"] if make is message_format else body["output"][0]["content"]
    assert content[0]["text"] == "".join(f"{idx} " for idx in range(NUM_TOKENS))
    assert work.num_made >= NUM_TOKENS and work.most_at_once <= 4 * MAX_ITEMS


async def test_events_repeat_log_probabilities_as_they_were_written():
    """Those of /v1/responses tell them five times, and make each once."""
    work, answer = Work(), responses_format()
    generation: Any = Told([])
    written = [answer.first(0, generation, has_notes=False)]
    for delta in deltas_of(work)[:-1]:
        written.append(answer.text(0, delta, generation))
    num_made = work.num_made
    written.append(answer.finish(0, TextDelta("", 0, "stop"), generation))
    assert work.num_made == num_made == NUM_TOKENS
    assert written[-1].count(b'"t999x2"') == 4


def test_the_arguments_of_a_call_are_joined_once():
    class Copied(str):
        num_chars = 0

        def __add__(self, other: str) -> Copied:
            Copied.num_chars += len(self) + len(other)
            return Copied(str.__add__(self, other))

    pieces = [
        ToolCallDelta(0, Copied("ab"), "id", "f"),
        *(ToolCallDelta(0, Copied("cd")) for _ in range(500)),
    ]
    deltas = [TextDelta("", calls=(piece,)) for piece in pieces]
    (call,) = WholeChoice.of([*deltas, TextDelta("", 0, "tool_calls")]).calls
    assert (call.name, call.call_id, call.arguments) == ("f", "id", "ab" + "cd" * 500)
    assert Copied.num_chars <= len(call.arguments)


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    last = deltas[-1]
    return TextDelta(
        "".join(delta.text for delta in deltas),
        sum(delta.num_tokens for delta in deltas),
        last.finish_reason,
        tuple(scores for delta in deltas for scores in delta.scores),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        "".join(delta.reasoning for delta in deltas),
        tuple(piece for delta in deltas for piece in delta.calls),
        sum(delta.num_reasoning_tokens for delta in deltas),
        last.stop_string,
    )


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 2), st.integers(0, 2), st.booleans())
def test_the_pieces_of_a_delta_are_the_delta(num_scores, max_scores, num_going_on, num_begun, is_last):
    calls = (
        *(ToolCallDelta(0, "1") for _ in range(num_going_on)),
        *(ToolCallDelta(idx + 1, "2", "id", "f") for idx in range(num_begun)),
    )
    reason, stop = ("stop", "END") if is_last else (None, None)
    delta = TextDelta("text", 3, reason, tuple(scores_of(num_scores)), (1, 2, 3), "thought", calls, 1, stop)
    pieces = list(delta.pieces(max_scores))
    assert joined(pieces) == delta
    assert max(len(piece.scores) for piece in pieces) <= max_scores
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    if num_scores > max_scores:
        assert not any(piece.name for each in pieces[:-1] for piece in each.calls)


async def test_an_echoed_prompt_comes_in_pieces_between_which_the_loop_goes_on():
    delta = TextDelta("a long prompt", 1, "stop", tuple(scores_of(1000)))

    class Tokens:
        async def __aiter__(self):
            yield SimpleNamespace(num_cached_tokens=0, token_ids=(1,), timing=None, step_s=0.0)

        async def aclose(self) -> None:
            pass

    metrics: Any = SimpleNamespace(finished=lambda outcome: None)
    metrics.tokens = SimpleNamespace(num=0)
    for name in ("ttft_s", "prompt_tokens", "cached_tokens"):
        setattr(metrics, name, SimpleNamespace(observe=lambda value: None, inc=lambda value: None))
    text: Any = SimpleNamespace(push=lambda event: delta)
    prompt: Any = SimpleNamespace(num_tokens=1000, release=lambda: None)
    tokens: Any = Tokens()
    choice = Choice(prompt, tokens, text, metrics, SystemClock(), RequestTimeline(0.0), keeps_timeline=False)
    turns: list[int] = []
    pieces: list[TextDelta] = []

    async def other() -> None:
        while True:
            turns.append(len(pieces))
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    async for piece in choice:
        pieces.append(piece)
    task.cancel()
    await choice.aclose()
    assert joined(pieces) == delta and len(pieces) == -(-1000 // MAX_SCORES)
    assert turns == list(range(1, len(pieces) + 1))[: len(turns)] and len(turns) >= len(pieces) - 1


async def test_a_small_answer_is_one_piece():
    fields = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    call = chat_call(ChatRequest.model_validate({"model": "org/demo", **fields}), CONTEXT)
    generations = await FakeDoor().chat(call)
    deltas = [[delta async for delta in generation] for generation in generations]
    assert len(list(ChatFormat("id", 1, "m", call).body(deltas, generations))) == 1
