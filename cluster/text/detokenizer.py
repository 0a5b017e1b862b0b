"""Token ids to text, piece by piece. One object per generated choice; runs in the door's process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

MAX_WINDOW = 16  # tokens decoded per push at most, besides the new ones
KEPT_WINDOW = 8  # tokens kept as context when the window moves on; a UTF-8 character spans at most 4
MAX_HELD = 3  # replacement characters at the end that may still become one real character
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a short window of the last tokens and emits what is new in it, so a push costs O(tokens pushed).

    Decoding needs context on the left (a leading space, a character cut in two), so the window keeps a few tokens whose
    text is already out. Replacement characters at the very end are held back: the next token may complete them.
    Special tokens are dropped.
    """

    def __init__(self, decode: Callable[[list[int]], str], special_ids: Collection[int]):
        self._decode = decode
        self._special_ids = special_ids
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_emitted = 0  # characters of `_text` that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that has become certain; may be empty."""
        new_ids = [token_id for token_id in token_ids if token_id not in self._special_ids]
        if not new_ids:
            return ""
        self._window += new_ids
        self._text = self._decode(self._window)
        emitted, self._num_emitted = self._num_emitted, max(self._num_emitted, self._num_stable())
        piece = self._text[emitted : self._num_emitted]
        if len(self._window) > MAX_WINDOW:
            self._window = self._window[-KEPT_WINDOW:]
            self._text = self._decode(self._window)
            self._num_emitted = self._num_stable()
        return piece

    def flush(self) -> str:
        """The end of the stream: what was held back, as it is."""
        piece = self._text[self._num_emitted :]
        self._num_emitted = len(self._text)
        return piece

    def _num_stable(self) -> int:
        end = len(self._text)
        floor = max(0, end - MAX_HELD)
        while end > floor and self._text[end - 1] == REPLACEMENT:
            end -= 1
        return end
