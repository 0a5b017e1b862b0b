"""Chunks of a PNG that say nothing of its picture are left out before Pillow reads it.

Pillow unpacks comments and colour profiles, and refuses the whole picture if one of them, or all together,
are large. Neither is used here. Only what may hold the orientation stays; Pillow's limits apply to it.
"""

from __future__ import annotations

from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_UNUSED = (*_TEXTS, b"iCCP")
_ORIENTATION_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type ")


def without_comments(data: bytes) -> bytes:
    """The same file, or a copy without chunks that are not needed."""
    kept: list[memoryview] = []
    view, start = memoryview(data), 0
    for begin, end in _chunks(data):
        if data[begin + 4 : begin + 8] in _UNUSED and not data.startswith(_ORIENTATION_KEYWORDS, begin + 8):
            kept.append(view[start:begin])
            start = end
    return b"".join((*kept, view[start:])) if kept else data


def _chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """[begin, end) of each chunk that is complete."""
    begin = len(SIGNATURE)
    while begin + 12 <= len(data):
        end = begin + 12 + int.from_bytes(data[begin : begin + 4])
        if end > len(data):
            return
        yield begin, end
        begin = end
