"""Where an item's bytes come from. This module reads data URIs, `fetch` reads remote URLs, and no path is
ever opened."""

from __future__ import annotations

import base64
import binascii
import io

import msgspec

from cluster.errors import MediaError
from cluster.media.settings import item_name
from cluster.types.media import MediaOptions, Modality

PIECE_CHARS = 2**18  # a multiple of four; takes 0.5 ms


class MediaSource(msgspec.Struct, frozen=True):
    """One item as the client wrote it, not checked yet."""

    modality: Modality
    url: str
    param: str = "messages"  # the request field that contained it
    options: MediaOptions = MediaOptions()  # the client's wishes for it


def read_source(source: MediaSource, max_bytes: int, item_idx: int = 0) -> tuple[bytes, str]:
    """The item's bytes and its declared type (only a hint: the magic bytes decide).

    Raises MediaError for anything that is not a valid data URI within `max_bytes`.
    """
    name, url = item_name(source.modality, item_idx), source.url
    if url[:5].lower() != "data:":
        raise MediaError(f"{name}: only data: URIs are read here", param=source.param)
    comma = url.find(",", 5, 512)
    if comma < 0:
        raise MediaError(f"{name}: a data URI needs a comma before its data", param=source.param)
    declared, *flags = url[5:comma].split(";")
    if "base64" not in (flag.strip().lower() for flag in flags):
        raise MediaError(f"{name}: a data URI must be base64", param=source.param)
    if (len(url) - comma - 1) // 4 * 3 - 2 > max_bytes:
        raise MediaError(f"{name}: larger than {max_bytes} bytes", param=source.param)
    try:
        data = _decoded(url, comma + 1)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name}: the data is not valid base64", param=source.param) from error
    if not data:
        raise MediaError(f"{name}: empty", param=source.param)
    if len(data) > max_bytes:
        raise MediaError(f"{name}: larger than {max_bytes} bytes", param=source.param)
    return data, declared.strip().lower()


def _decoded(url: str, start: int) -> bytes:
    """Decodes base64 from `start` on, in pieces. A single call would hold the interpreter's lock, and so
    block the event loop, until the end."""
    data = io.BytesIO()
    for begin in range(start, len(url), PIECE_CHARS):
        piece = base64.b64decode(url[begin : begin + PIECE_CHARS], validate=True)
        if len(piece) < PIECE_CHARS // 4 * 3 and begin + PIECE_CHARS < len(url):
            raise ValueError("padding before the end")
        data.write(piece)
    return data.getvalue()
