"""Stop strings over streamed text. Pure; one object per generated choice."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream before the first stop string, or behind it. Holds back only text that could still become
    a stop string.

    The first match is the one that ends first; of several with the same end, the one that starts first. Only
    this rule does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], *, keeps_match: bool = False):
        """`keeps_match`: the stop string is part of the text."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._keeps_match = keeps_match
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string if one was found. After a match all further text
        is dropped."""
        if not self._stops:
            return text, None
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        if match := self._first_match(text):
            start, self._matched = match
            self._held = ""
            return text[: start + len(self._matched) * self._keeps_match], self._matched
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The end of the stream: the text that was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _hold_from(self, text: str) -> int:
        """Start of the longest suffix that is the beginning of a stop string."""
        cut = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < cut:
                if stop.startswith(text[start:]):
                    cut = start
                    break
                start = text.find(stop[0], start + 1)
        return cut
