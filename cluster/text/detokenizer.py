"""Token ids to text, piece by piece. One object per generated choice; runs in the door's process.

`tokenizers.DecodeStream` is not used, because a model may generate byte tokens that are not valid UTF-8. For
these it holds text back without limit, raises an exception for some sequences, and cannot return what it
holds at the end of a stream. For tokens of valid text both give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

MAX_WINDOW = 16  # most tokens decoded per pushed token, besides the pushed one
KEPT_WINDOW = 8  # when the window becomes longer than this, it is shortened at the next complete character
MAX_HELD = 3  # bytes of an incomplete UTF-8 character
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a short window of the last tokens and returns the new part of its text, so a token costs O(1).

    * Decoding needs context on the left (a leading space, a run of byte tokens), so the window keeps some
      tokens whose text is already out. It starts where the text was complete.
    * Replacement characters at the end are held back, because the next tokens may complete a character. A
      decoder with byte fallback even turns all characters of a run of byte tokens into replacement characters
      until the last one is complete.
    * If no complete character comes within `MAX_WINDOW` tokens, the tokens are not valid UTF-8, and
      replacement characters go out.
    * Special tokens are dropped.
    """

    def __init__(self, decode: Callable[[list[int]], str], special_ids: Collection[int]):
        self._decode = decode
        self._special_ids = special_ids
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_emitted = 0  # characters of `_text` that are out
        self._num_complete = 0  # tokens of the window after which the text was complete last

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that has become certain; may be empty."""
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._special_ids])

    def flush(self) -> str:
        """The end of the stream: the text that was held back."""
        piece = self._text[self._num_emitted :]
        self._num_emitted = len(self._text)
        return piece

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._text = self._decode(self._window)
        num_stable = len(self._text.rstrip(REPLACEMENT))
        is_complete = num_stable == len(self._text)
        is_invalid = not is_complete and len(self._window) > MAX_WINDOW
        if is_invalid:
            num_stable = max(num_stable, len(self._text) - MAX_HELD)
        piece = self._text[self._num_emitted : num_stable]
        self._num_emitted = max(self._num_emitted, num_stable)
        if is_invalid:
            num_held = len(self._text) - self._num_emitted
            self._keep(self._window[-KEPT_WINDOW:], num_held)
        elif is_complete:
            if len(self._window) > KEPT_WINDOW:
                self._keep(self._window[self._num_complete :], 0)
            self._num_complete = len(self._window)
        return piece

    def _keep(self, window: list[int], num_held: int) -> None:
        self._window = window
        self._text = self._decode(window)
        self._num_emitted = len(self._text) - num_held
        self._num_complete = 0
