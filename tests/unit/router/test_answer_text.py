"""Text and log-probabilities of one choice. Tokens are bytes; the last one is special."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.text.detokenizer import Detokenizer
from cluster.text.pieces import TokenPieces
from cluster.text.stop import StopFilter, StopStrings
from cluster.types.logprobs import TokenLogprobs
from cluster.types.messages import FinishReason, TokenEvent
from router.answer_text import AnswerText
from router.calls import TextDelta
from tests.fakes.counting import num_lines

END = 256
SAID = "naïve 🙂!"


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(b"<end>" if each == END else bytes([each]) for each in token_ids).decode(errors="replace")


def answer_text(*stops: str, shows: bool = False, shows_special: bool = False) -> AnswerText:
    return AnswerText(
        Detokenizer(decode, () if shows_special else (END,)),
        StopFilter(StopStrings(stops), keeps_match=shows),
        TokenPieces(decode, lambda token_id: f"<0x{token_id:02X}>", ord("a")),
        shows_stop_token=shows,
        returns_token_ids=True,
    )


def pushed(text: AnswerText, token_ids: Sequence[int], size: int, reason: FinishReason) -> list[TextDelta]:
    """`size` tokens in an event; the log-probability of a token says which one it is."""
    deltas = []
    for start in range(0, len(token_ids), size):
        new = tuple(token_ids[start : start + size])
        logprobs = tuple(TokenLogprobs(-(start + i), (new[i], 33), (-1.0, -2.0)) for i in range(len(new)))
        is_last = start + size >= len(token_ids)
        deltas.append(text.push(TokenEvent("r", new, reason if is_last else None, logprobs=logprobs)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_scores_go_out_with_the_text_of_their_tokens(size):
    token_ids = [*SAID.encode(), END]
    deltas = pushed(answer_text("!?"), token_ids, size, FinishReason.STOP)
    text, piece = "", b""
    for delta in deltas:
        text += delta.text
        piece += b"".join(scores.drawn.piece for scores in delta.scores)
        assert piece.removesuffix(b"<end>").decode() == text
    assert text == SAID and deltas[-1].finish_reason == "stop"
    scores = [each for delta in deltas for each in delta.scores]
    assert [each.drawn.logprob for each in scores] == [-float(i) for i in range(len(token_ids))]
    assert [each.top[0].piece for each in scores] == [each.drawn.piece for each in scores]
    assert [each.offset for each in scores] == [
        len(bytes(token_ids[:i]).decode(errors="ignore")) for i in range(len(token_ids))
    ]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids


@pytest.mark.parametrize("size", [1, 4, 50])
@pytest.mark.parametrize(("shows", "kept"), [(False, "naï"), (True, "naïve ")])
def test_a_stop_string_cuts_the_scores_of_what_it_cuts_off(size, shows, kept):
    deltas = pushed(answer_text("ve ", shows=shows), SAID.encode(), size, FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == kept and deltas[-1].finish_reason == "stop"
    scores = [each.drawn.piece for delta in deltas for each in delta.scores]
    assert b"".join(scores).decode() == kept


def test_text_that_is_held_back_goes_out_at_the_end_with_its_scores():
    deltas = pushed(answer_text("!!"), [*b"ab!", 0xF0, 0x9F], 1, FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "!\ufffd"]
    assert [len(delta.scores) for delta in deltas] == [1, 1, 0, 0, 3]
    assert deltas[-1].finish_reason == "length"


def test_tokens_without_text_are_looked_at_once_and_go_out_with_the_next_that_has_some():
    deltas = pushed(answer_text(), [97, *[END] * 500, 98, *[END] * 5], 1, FinishReason.LENGTH)
    assert [len(delta.scores) for delta in deltas] == [1, *[0] * 500, 501, 0, 0, 0, 0, 5]
    lines = [
        num_lines(lambda n=n: pushed(answer_text(), [END] * n, 1, FinishReason.LENGTH)) for n in (200, 400)
    ]
    assert lines[1] <= 2.1 * lines[0]


@pytest.mark.parametrize(
    ("shows", "shows_special", "expected"),
    [(False, False, "ab"), (True, False, "ab"), (False, True, "a<end>b"), (True, True, "a<end>b<end>")],
)
def test_the_token_that_ends_an_answer_and_special_tokens_have_text_if_the_client_wants_it(
    shows, shows_special, expected
):
    text = answer_text(shows=shows, shows_special=shows_special)
    deltas = pushed(text, [97, END, 98, END], 1, FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == expected
    plain = answer_text(shows=shows)
    assert plain.push(TokenEvent("r", (97, 98), FinishReason.STOP)).text == ("ab" if shows else "a")
