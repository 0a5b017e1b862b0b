"""What an answer tells of its prompt: which tokens, where in the text, and which have no log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.text.detokenizer import Detokenizer
from cluster.text.echo import EchoedPrompt, echo_of
from cluster.types.logprobs import TokenLogprobs
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.calls import RankedToken, ScoredToken, TextDelta, TokenScores
from router.prompt_report import PromptReport

WORDS = {1: "<s>", 2: "a", 3: "bc", 4: "<sep>", 5: "d"}
SPECIAL = {1, 4}
ITEM = PlacedMedia(Modality.IMAGE, "x", ((2, 2),), MediaGeometry(2))
SHOWN = Prompt((2, 3, 9, 9, 5), (ITEM,))
FOUND = (TokenLogprobs(-1.0, (3, 5), (-1.0, -2.0)), TokenLogprobs(-7.0, (2, 3), (-0.5, -1.5)))


class FakeText:
    """Stands for `TextProcessor`."""

    def detokenizer(self, *, skips_special: bool = True) -> Detokenizer:
        return Detokenizer(self.text, SPECIAL if skips_special else ())

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(WORDS[token_id] for token_id in token_ids)


@dataclass
class Threads:
    """Where prompts are read."""

    num_calls: int = 0
    pieces: Any = field(default_factory=lambda: FakePieces())

    async def __call__(self, function: Any, argument: Any) -> None:
        self.num_calls += 1
        function(argument)


class FakePieces:
    def of(self, token_id: int) -> bytes:
        return WORDS[token_id].encode()


def report(prompt: Prompt, threads: Threads, **fields: Any) -> PromptReport:
    return PromptReport(prompt, threads.pieces, threads, **fields)


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("abc<sep>d", "abc<sep>d", (0, 0, 1, 3, 8)),  # the tokenizer has put a token before the text
        ("<s>abc<sep>d", "<s>abc<sep>d", (0, 3, 4, 6, 11)),
        ((1, 2, 3, 4, 5), "<s>abc<sep>d", (0, 3, 4, 6, 11)),
    ],
)
def test_a_prompt_is_echoed_as_it_was_sent(prompt, text, offsets):
    fake: Any = FakeText()
    assert echo_of(fake, prompt, (1, 2, 3, 4, 5)) == EchoedPrompt(text, offsets)


async def test_what_stands_for_media_has_no_log_probability():
    told = report(SHOWN, Threads(), num_told=1)
    delta = TextDelta("x", 1)
    assert await told.introduce(FOUND, delta) == delta
    own = RankedToken(3, -1.0, 1, "bc")
    behind = (RankedToken(5, -7.0, None, "d"), RankedToken(2, -0.5, 1, "a"))
    assert list(told.told) == [None, (own,), None, None, behind]


async def test_the_prompt_stands_before_the_answer_and_is_read_once():
    threads = Threads()
    echoed = report(Prompt((2, 3, 5)), threads, echo=EchoedPrompt("abcd", (0, 1, 3)), num_echoed=1)
    drawn = TokenScores(ScoredToken(b"a", -0.1), (), echoed.num_chars)
    for _ in range(2):  # choices
        first = await echoed.introduce(FOUND, TextDelta("a", 1, "stop", (drawn,)))
        assert (first.text, first.finish_reason, first.scores[3]) == ("abcda", "stop", drawn)
        assert first.scores[0] == TokenScores(ScoredToken(b"a", None), (), 0)
        assert first.scores[2] == TokenScores(ScoredToken(b"d", -7.0), (ScoredToken(b"a", -0.5),), 3)
    assert threads.num_calls == 1 and not echoed.told


async def test_an_echo_alone_reads_nothing_and_may_be_all():
    threads = Threads()
    alone = report(Prompt((2, 3)), threads, echo=EchoedPrompt("abc", (0, 1)), generates=False)
    assert await alone.introduce((), TextDelta("a", 1, "stop", (), (2,))) == TextDelta("abc", 0, "length")
    assert threads.num_calls == 0


def test_a_request_that_goes_on_has_told_its_prompt_with_the_first_token():
    request = GenerateRequest("r", SHOWN, (SamplingParams(),), StopParams(4), num_prompt_logprobs=0)
    assert request.resumed("r.1", (0,), ()).num_prompt_logprobs == 0
    assert request.resumed("r.1", (0,), (7,)).num_prompt_logprobs is None
