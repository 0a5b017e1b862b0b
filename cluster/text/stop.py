"""Stop strings over streamed text. Pure; `StopStrings` is shared by the choices of a request, each of which
has a `StopFilter` of its own. A character costs O(1), however many and however long the stop strings are."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text.sequences import START, SequenceAutomaton


class StopStrings:
    """The stop strings of one request. Frozen."""

    def __init__(self, strings: Sequence[str]):
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self.strings = tuple(strings)
        self.automaton = SequenceAutomaton(self.strings)


class StopFilter:
    """Cuts a stream before the first stop string, or after it. Holds back only text that could still become
    a stop string.

    The first match is the one that ends first; of several with the same end, the one that starts first. Only
    this rule does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: StopStrings, *, keeps_match: bool = False):
        """`keeps_match`: the stop string is part of the text."""
        self._strings = stops.strings
        self._automaton = stops.automaton
        self._keeps_match = keeps_match
        self._node = START  # stands for the text that is held back
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string if one was found. After a match all further text
        is dropped."""
        if not self._strings:
            return text, None
        if self._matched is not None:
            return "", self._matched
        held, node = self._node, self._node
        for i, char in enumerate(text):
            node = self._automaton.step(node, char)
            match = self._automaton.longest_match(node)
            if match is not None:
                self._node, self._matched = START, self._strings[match]
                num_left = 0 if self._keeps_match else len(self._matched)
                return self._without_end(held, text[: i + 1], num_left), self._matched
        self._node = node
        return self._without_end(held, text, self._automaton.beginning(node)[1]), None

    def flush(self) -> str:
        """The end of the stream: the text that was held back is ordinary text."""
        held, self._node = self._node, START
        return self._without_end(held, "", 0)

    def _without_end(self, held: int, text: str, num_left: int) -> str:
        """The text that was held back at this node and the new text, but for so many characters."""
        string, depth = self._automaton.beginning(held)
        num_out = depth + len(text) - num_left
        return (
            self._strings[string][: min(depth, num_out)] + text[: max(0, num_out - depth)] if num_out else ""
        )
