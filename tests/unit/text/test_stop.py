from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.stop import StopStrings

LETTERS = "ab"


def whole_text(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: of all matches the one that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text(LETTERS, max_size=5), max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4),
)
def test_any_split_of_a_stream_gives_what_the_whole_text_gives(pieces, stops):
    stream, out, matched = StopStrings(stops), "", None
    for piece in pieces:
        emitted, matched = stream.push(piece)
        out += emitted
    out += stream.flush()
    assert (out, matched) == whole_text("".join(pieces), stops)


def test_only_the_possible_start_of_a_stop_string_is_held_back():
    stream = StopStrings(["###", "END"])
    assert stream.push("hello #") == ("hello ", None)
    assert stream.push("1 E") == ("#1 ", None)
    assert stream.push("N") == ("", None)
    assert stream.push("D and more") == ("", "END")
    assert stream.push("more") == ("", "END")
    assert stream.flush() == ""


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError):
        StopStrings([""])
