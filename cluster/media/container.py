"""Opens video and audio containers.

Magic bytes select the demuxer from a fixed list, and FFmpeg is forced to use it. Otherwise FFmpeg would also
try playlists and other formats that make it open further files or addresses. Only decoders of common codecs
may run, not the hundreds of others in FFmpeg.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import av
import av.logging
from av.container import InputContainer
from av.stream import Disposition

from cluster.errors import MediaError, NoSoundError
from cluster.media.boxes import check_index
from cluster.media.settings import MediaLimits

av.logging.set_level(None)
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
# FFmpeg's limit also applies to a decoder's own buffers, which are larger than the frames of tiny videos.
MIN_BUFFER_PIXELS = 2**20
VIDEO_CODECS = frozenset((
    "h264", "hevc", "vvc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video",
    "mpeg1video", "mjpeg",
    "h263", "flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "wmv3", "vc1", "theora", "prores", "dnxhd", "gif",
    "apng", "png",
    "rawvideo", "vp6f", "vp6a",
))  # fmt: skip
AUDIO_CODECS = frozenset((
    "aac", "aac_latm", "mp1", "mp1float", "mp2", "mp2float", "mp3", "mp3float", "opus", "libopus", "vorbis",
    "flac", "alac",
    "ac3", "eac3", "dca", "wmav1", "wmav2", "wmapro", "amrnb", "amrwb", "libopencore_amrnb",
    "libopencore_amrwb", "speex", "gsm", "gsm_ms",
    "adpcm_ima_wav", "adpcm_ms", "adpcm_ima_qt", "adpcm_swf", "g722", "g726",
    *(name for name in av.codecs_available if name.startswith("pcm_")),
))  # fmt: skip
# WebM keeps transparency next to the picture, where FFmpeg's own decoders do not look.
_DECODERS_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_MP4_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_BY_FIRST_BYTES = {
    b"\x1aE\xdf\xa3": "matroska",
    b"OggS": "ogg",
    b"fLaC": "flac",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"FLV\x01": "flv",
    b"caff": "caf",
    b"#!AMR": "amr",
    b".snd": "au",
    b"RF64": "wav",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf",
    b"\x00\x00\x01\xba": "mpeg",
    b"ID3": "mp3",
}


class DecodeBudget:
    """The packets that one survey or decode of one item may read. Its time is limited from outside:
    `cluster.media.processes` ends the process of an order that takes too long."""

    def __init__(self, limits: MediaLimits):
        self.limits = limits
        self._packets_left = limits.max_packets

    def take_packet(self) -> None:
        self._packets_left -= 1
        if self._packets_left < 0:
            raise MediaError(f"more than {self.limits.max_packets} packets are not accepted")


def container_format(data: bytes) -> str | None:
    """FFmpeg's demuxer name for these bytes; None if they are not of an accepted format."""
    head = data[:16]
    if head[4:8] in _MP4_FIRST_BOXES:
        return None if head[8:12] in HEIC_BRANDS else "mp4"
    for first, name in _BY_FIRST_BYTES.items():
        if head.startswith(first):
            return name
    if head.startswith(b"RIFF"):
        return {b"AVI ": "avi", b"WAVE": "wav"}.get(head[8:12])
    if head.startswith(b"FORM") and head[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if head.startswith(b"\x89PNG") and data.find(b"acTL", 0, data.find(b"IDAT")) > 0:
        return "apng"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "mp3"
    if data[0:1] == b"G" and data[188:189] == b"G":
        return "mpegts"
    return None


@contextmanager
def open_container(data: bytes, budget: DecodeBudget) -> Iterator[InputContainer]:
    """Raises MediaError for unknown formats, and whatever PyAV raises for broken files."""
    name = container_format(data)
    if name is None:
        raise MediaError("not a container format this server accepts")
    if name == "mp4":
        check_index(data, budget.limits.max_packets)
    with av.open(
        io.BytesIO(data),
        mode="r",
        format=name,
        options=_codec_options(budget),
        container_options={
            "max_streams": str(budget.limits.max_streams),
            **({"max_probe_packets": "1"} if name == "wav" else {}),  # else looks for DTS in PCM: 3 ms
        },
        io_open=_refuse_to_open,
    ) as container:
        yield container


def first_stream(container: InputContainer, kind: Literal["video", "audio"], budget: DecodeBudget) -> Any:
    """The stream to decode, with its decoder limited to the budget. (PyAV has different types for video and
    audio streams.)"""
    streams = [stream for stream in container.streams if stream.type == kind]
    if kind == "video":  # the cover of a song is not a video
        streams = [s for s in streams if not s.disposition & Disposition.attached_pic]
    if not streams and kind == "audio":
        raise NoSoundError("has no sound track")
    if not streams:
        raise MediaError("has no video stream")
    context = streams[0].codec_context
    name = None if context is None else context.codec.name
    if name not in (VIDEO_CODECS if kind == "video" else AUDIO_CODECS):
        raise MediaError(f"the codec of its {kind} stream is not accepted ({name or 'unknown'})")
    context.options = _codec_options(budget)
    return streams[0]


def picture_decoder(stream: Any, budget: DecodeBudget) -> Any:
    """The decoder of a video stream, with its transparency if it has one."""
    context = stream.codec_context
    name = _DECODERS_WITH_ALPHA.get(context.name) if stream.metadata.get("alpha_mode") == "1" else None
    if name is None or name not in av.codecs_available:
        return context
    decoder = av.CodecContext.create(name, "r")
    decoder.options = _codec_options(budget)
    return decoder


def _codec_options(budget: DecodeBudget) -> dict[str, str]:
    return {
        "max_pixels": str(max(budget.limits.max_pixels, MIN_BUFFER_PIXELS)),
        "codec_whitelist": ",".join(sorted(VIDEO_CODECS | AUDIO_CODECS)),
    }


def _refuse_to_open(url: str, *_: object) -> Any:
    raise MediaError("refers to another file")
