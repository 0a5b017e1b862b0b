"""What one token adds to a text, as bytes: for log-probabilities, which name tokens one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from cluster.text.detokenizer import REPLACEMENT

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenPieces:
    """A token's text depends on what stands before it: at the beginning of a text some tokenizers drop a
    space. So tokens are decoded after another one. Bytes that are not a character by themselves are read
    from the vocabulary, where byte-level tokenizers and byte fallback have them."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], token_of: Callable[[int], str | None], before: int
    ):
        """`token_of`: a token id as it stands in the vocabulary. `before`: any token of plain text."""
        self._decode = decode
        self._token_of = token_of
        self._before = before
        self._num_before = len(decode([before]))
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._read(token_id)
        return piece

    def _read(self, token_id: int) -> bytes:
        text = self._decode([self._before, token_id])[self._num_before :]
        if REPLACEMENT not in text:
            return text.encode()
        token = self._token_of(token_id) or ""
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        if token and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and more."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
