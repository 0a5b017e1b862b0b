"""Where an item's bytes come from. This module reads data URIs, `fetch` reads remote URLs, and no path is
ever opened."""

from __future__ import annotations

import base64
import binascii
import io

import msgspec

from cluster.errors import MediaError
from cluster.types.media import MediaOptions, Modality

PIECE_CHARS = 2**18  # takes 0.5 ms
WHITE_SPACE = b" \t\n\r\f"  # as in browsers; MIME breaks lines of 76 characters by CR LF
WHITE_CHARS, WHITE_SHARE = 64, 8  # so many of its characters and one in eight may be white space


class MediaSource(msgspec.Struct, frozen=True):
    """One item as the client wrote it, not checked yet."""

    modality: Modality
    url: str
    param: str = "messages"  # the request field that contained it
    options: MediaOptions = MediaOptions()  # the client's wishes for it


def read_data_uri(url: str, max_bytes: int) -> bytes:
    """The bytes in a data URI. Raises MediaError, without the item's name, for one that is not valid within
    `max_bytes`. The declared type says nothing: the magic bytes decide."""
    comma = url.find(",", 5, 512)
    if comma < 0:
        raise MediaError("a data URI needs a comma before its data")
    if "base64" not in (flag.strip().lower() for flag in url[5:comma].split(";")[1:]):
        raise MediaError("a data URI must be base64")
    try:
        data = _decoded(url, comma + 1, max_bytes)
    except (binascii.Error, ValueError) as error:
        raise MediaError("the data is not valid base64") from error
    if not data:
        raise MediaError("empty")
    if len(data) > max_bytes:
        raise MediaError(f"larger than {max_bytes} bytes")
    return data


def _decoded(url: str, start: int, max_bytes: int) -> bytes:
    """Decodes base64 from `start` on until it is larger than `max_bytes`, in pieces. A single call would hold
    the interpreter's lock, and so block the event loop, until the end. Raises ValueError."""
    data, rest, num_white, is_padded = io.BytesIO(), b"", 0, False
    for begin in range(start, len(url), PIECE_CHARS):
        raw = url[begin : begin + PIECE_CHARS].encode("ascii")
        piece = raw.translate(None, WHITE_SPACE)
        num_white += len(raw) - len(piece)
        if num_white > WHITE_CHARS + (begin + len(raw) - start) // WHITE_SHARE:
            raise ValueError("too much white space")
        piece = rest + piece
        end = len(piece) // 4 * 4
        if is_padded and piece:
            raise ValueError("padding before the end")
        data.write(base64.b64decode(piece[:end], validate=True))
        is_padded, rest = piece[:end].endswith(b"="), piece[end:]
        if data.tell() > max_bytes:
            return data.getvalue()
    if rest:
        raise ValueError("it ends within a group of four")
    return data.getvalue()
