"""Opens video and audio containers. The demuxer is chosen by magic bytes from a fixed list and forced on FFmpeg, which
would otherwise also try playlists and other formats that make it open further files or addresses."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import av
import av.logging
from av.container import InputContainer

from cluster.errors import MediaError

av.logging.set_level(None)


def container_format(data: bytes) -> str | None:
    """FFmpeg's demuxer name for these bytes, None when they are not of an accepted format."""
    head = data[:16]
    if head[4:8] == b"ftyp":
        return "mp4"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF"):
        return {b"AVI ": "avi", b"WAVE": "wav"}.get(head[8:12])
    if head.startswith(b"OggS"):
        return "ogg"
    if head.startswith(b"fLaC"):
        return "flac"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith(b"FLV\x01"):
        return "flv"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"
    if head.startswith(b"ID3") or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        return "mp3"
    if data[0:1] == b"G" and data[188:189] == b"G":
        return "mpegts"
    return None


@contextmanager
def open_container(data: bytes) -> Iterator[InputContainer]:
    name = container_format(data)
    if name is None:
        raise MediaError("not a container format this server accepts")
    with av.open(io.BytesIO(data), mode="r", format=name) as container:
        yield container
