from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.sequences import START, SequenceAutomaton
from cluster.text.stop import StopFilter, StopStrings
from tests.fakes.counting import CountedDict

LETTERS = "ab"
A = "a" * 999
HARD = {  # stop strings that long beginnings of an answer in one letter could become
    "long beginnings": [A + letter for letter in "bcdefghijklmnop"],
    "one that holds back": [*(f"a{i}b" for i in range(15)), A + "b"],
    "nested": ["a" * i + "b" for i in range(1, 17)],
    "periodic": ["ab" * 400 + "c", "aab" * 300 + "c", "a" * 999 + "b"],
}


def whole_text(text: str, stops: list[str], *, keeps_match: bool) -> tuple[str, str | None]:
    """The definition: of all matches the one that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest) * (not keeps_match)], longest
    return text, None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text(LETTERS, max_size=5), max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=7), max_size=6),
    keeps_match=st.booleans(),
)
def test_any_split_of_a_stream_gives_what_the_whole_text_gives(pieces, stops, keeps_match):
    stream, out, read = StopFilter(StopStrings(stops), keeps_match=keeps_match), "", ""
    for piece in pieces:
        emitted, matched = stream.push(piece)
        out, read = out + emitted, read + piece
        assert matched == whole_text(read, stops, keeps_match=keeps_match)[1]
        if matched is None:  # the longest end that could still become a stop string is held back, no more
            ends = (read[i:] for i in range(len(read) + 1))
            held = next(end for end in ends if not end or any(stop.startswith(end) for stop in stops))
            assert out + held == read
    expected, matched = whole_text("".join(pieces), stops, keeps_match=keeps_match)
    assert out + stream.flush() == expected and stream.push("")[1] == matched


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sequences=st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=8),
    stream=st.lists(st.integers(0, 3), max_size=30),
)
def test_an_automaton_finds_all_sequences_that_a_stream_ends_with(sequences, stream):
    automaton, node = SequenceAutomaton(sequences), START
    for end in range(len(stream) + 1):
        if end:
            node = automaton.step(node, stream[end - 1])
        read = tuple(stream[:end])
        expected = [
            i for i, each in enumerate(sequences) if read[end - len(each) :] == each and len(each) <= end
        ]
        found = list(automaton.matches(node))
        assert sorted(found) == expected
        assert [len(sequences[i]) for i in found] == sorted((len(sequences[i]) for i in found), reverse=True)
        assert automaton.longest_match(node) == (found[0] if found else None)
        i, depth = automaton.beginning(node)
        held = max(n for n in range(end + 1) if any(each[:n] == read[end - n :] for each in [(), *sequences]))
        assert depth == held and (not depth or sequences[i][:depth] == read[end - depth :])


@pytest.mark.parametrize("stops", HARD.values(), ids=HARD)
@pytest.mark.parametrize("piece", ["a", "ab", "aab", "a" * 100])
def test_a_character_takes_two_steps_at_most_whatever_the_stop_strings_are(stops, piece):
    strings = StopStrings(stops)
    edges = strings.automaton.edges = CountedDict(strings.automaton.edges)
    stream, num_chars = StopFilter(strings), 0
    while num_chars < 4000:
        if stream.push(piece)[1] is not None:
            stream = StopFilter(strings)
        num_chars += len(piece)
    assert edges.num_lookups <= 2 * num_chars


@pytest.mark.parametrize("stops", HARD.values(), ids=HARD)
def test_an_automaton_is_built_in_steps_in_proportion_to_its_strings(stops):
    class Counting(SequenceAutomaton):
        num_steps = 0

        def step(self, node, item):
            self.num_steps += 1
            if not isinstance(self.edges, CountedDict):
                self.edges = CountedDict(self.edges)
            return super().step(node, item)

    automaton = Counting(stops)
    num_chars = sum(map(len, stops))
    edges: Any = automaton.edges
    assert automaton.num_steps <= num_chars and edges.num_lookups <= 4 * num_chars


def test_only_the_possible_start_of_a_stop_string_is_held_back():
    stream = StopFilter(StopStrings(["###", "END"]))
    assert stream.push("hello #") == ("hello ", None)
    assert stream.push("1 E") == ("#1 ", None)
    assert stream.push("N") == ("", None)
    assert stream.push("D and more") == ("", "END")
    assert stream.push("more") == ("", "END")
    assert stream.flush() == ""


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError):
        StopStrings([""])
