"""Files that are made to do harm: headers that lie about sizes, decompression bombs, huge index values,
loops, and bytes that are no media.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import cache

from bench import media_files

HUGE = (2**31 - 1, 2**32 - 1)
BOMB_BYTES = 100 * 2**20  # of zeros, compressed
PNG_START = b"\x89PNG\r\n\x1a\n"


@cache
def files() -> tuple[tuple[str, bytes], ...]:
    """(name, content), all small."""
    makers = (_pngs, _other_images, _tiffs, _mp4s, _containers, _sounds, _strangers)
    return tuple(entry for maker in makers for entry in maker())


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(
    width: int, height: int, pixels: bytes = b"", extra: bytes = b"", depth: int = 8, colour: int = 2
) -> bytes:
    """A PNG whose header declares this size. `extra`: chunks before the pixel data, which consist of filtered
    rows.
    """
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        PNG_START
        + _chunk(b"IHDR", header)
        + extra
        + _chunk(b"IDAT", zlib.compress(pixels))
        + _chunk(b"IEND", b"")
    )


@cache
def _bomb() -> bytes:
    return zlib.compress(bytes(BOMB_BYTES), 9)


def _pngs() -> Iterator[tuple[str, bytes]]:
    pixel = b"\0\1\2\3"
    for width, height in ((2**31 - 1, 2**31 - 1), (60_000, 60_000), (0, 5), (2**31 - 1, 1)):
        yield f"png {width}x{height}", png(width, height, pixel)
    yield "png bomb in IDAT", PNG_START + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)) + _chunk(b"IDAT", _bomb())  # fmt: skip
    for kind, head in (
        (b"zTXt", b"a\0\0"),
        (b"iTXt", b"a\0\1\0\0\0"),
        (b"iCCP", b"a\0\0"),
        (b"zTXt", b"Raw profile type exif\0\0"),
    ):
        yield f"png bomb in {kind.decode()}", png(1, 1, pixel, _chunk(kind, head + _bomb()))
    yield "png of a million chunks", png(1, 1, pixel, _chunk(b"tEXt", b"a\0b") * 50_000)
    for count in HUGE:
        yield f"apng of {count} frames", png(1, 1, pixel, _chunk(b"acTL", struct.pack(">II", count, 0)))
    control = struct.pack(">IIIIIHHBB", 0, 60_000, 60_000, 60_000, 60_000, 1, 0, 0, 0)
    yield (
        "apng frame outside",
        png(1, 1, pixel, _chunk(b"acTL", struct.pack(">II", 2, 0)) + _chunk(b"fcTL", control)),
    )
    for size in ((1, 1), (1, 30_000), (30_000, 1), (3, 1)):
        yield f"{size[0]}x{size[1]} pixels", media_files.image(*size)


def _other_images() -> Iterator[tuple[str, bytes]]:
    gif = media_files.animation()
    yield "gif canvas", gif[:6] + b"\xff\xff\xff\xff" + gif[10:]
    frame = gif.index(b"\x2c")
    yield "gif frame", gif[: frame + 5] + b"\xff\xff\xff\xff" + gif[frame + 9 :]
    yield "gif without frames", gif[:13] + b";"
    webp = media_files.animation(3, "WEBP")
    yield "webp canvas", webp[:24] + b"\xff\xff\xff\xff\xff\xff" + webp[30:]
    yield "webp frames without end", webp[:30] + (b"ANMF" + struct.pack("<I", 0)) * 100_000
    still = media_files.image(8, 8, "WEBP", lossless=True)
    yield "webp lossless canvas", still[:21] + b"\xff\xff\xff\x0f" + still[25:]
    lossy = media_files.image(8, 8, "WEBP")
    yield "webp lossy canvas", lossy[:26] + b"\xff\x3f\xff\x3f" + lossy[30:]
    jpeg = media_files.image(8, 8, "JPEG")
    size = jpeg.index(b"\xff\xc0") + 5
    yield "jpeg size", jpeg[:size] + b"\xff\xff\xff\xff" + jpeg[size + 4 :]
    progressive = media_files.image(600, 600, "JPEG", progressive=True)
    scan = progressive.rindex(b"\xff\xda")
    yield "jpeg of many scans", progressive[:-2] + progressive[scan:-2] * 200 + b"\xff\xd9"
    bmp = media_files.image(8, 8, "BMP")
    for width, height in ((2**31 - 1, 2**31 - 1), (-5, 5), (5, -(2**31)), (8, 2**20)):
        yield f"bmp {width}x{height}", bmp[:18] + struct.pack("<ii", width, height) + bmp[26:]
    yield (
        "bmp run lengths",
        bmp[:18] + struct.pack("<iiHHI", 1500, 1500, 1, 8, 1) + bmp[34:54] + b"\0\2\xff\xff" * 3000,
    )
    for content in (media_files.image(8, 8, "AVIF"), media_files.animation(3, "AVIF")):
        place = content.index(b"ispe") + 8
        yield "avif canvas", content[:place] + b"\0\0\xff\xff\0\0\xff\xff" + content[place + 8 :]
    for count in HUGE:
        lying = struct.pack(">IIII", 0, 1, count, 1)
        yield f"avif of {count} frames", _with_box(media_files.animation(3, "AVIF"), b"stts", lying)


def _tiff(entries: list[tuple[int, int, int, int]], following: int = 0, extra: bytes = b"") -> bytes:
    """Little endian, one directory of (tag, type, count, value)."""
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + struct.pack("<I", following) + extra


def _tiffs() -> Iterator[tuple[str, bytes]]:
    def size(width: int, height: int) -> list[tuple[int, int, int, int]]:
        return [
            (256, 4, 1, width),
            (257, 4, 1, height),
            (258, 3, 1, 8),
            (259, 3, 1, 1),
            (262, 3, 1, 1),
            (277, 3, 1, 1),
        ]

    yield "tiff size", _tiff([*size(2**31 - 1, 2**31 - 1), (273, 4, 1, 8), (279, 4, 1, 8)])
    yield (
        "tiff strips beyond",
        _tiff([*size(1000, 1000), (273, 4, 1, 2**31), (278, 4, 1, 1), (279, 4, 1, 2**31)]),
    )
    yield "tiff tag of billions", _tiff([*size(8, 8), (273, 4, 2**32 - 1, 8), (279, 4, 2**31, 8)])
    yield "tiff directory loop", _tiff([*size(8, 8), (273, 4, 1, 8), (279, 4, 1, 64)], 8, bytes(64))
    yield (
        "tiff tiles",
        _tiff([*size(8, 8), (322, 4, 1, 2**30), (323, 4, 1, 2**30), (324, 4, 1, 8), (325, 4, 1, 8)]),
    )
    small = [entry for entry in size(1000, 1000) if entry[0] != 259]
    tiles = [(322, 4, 1, 60_000), (323, 4, 1, 60_000), (324, 4, 1, 8), (325, 4, 1, 8)]
    for compression in (5, 8, 34925, 50000):
        yield f"tiff tiles {compression}", _tiff(sorted([*small, (259, 3, 1, compression), *tiles]))
        strip = [(273, 4, 1, 8), (278, 4, 1, 1000), (279, 4, 1, 100)]
        yield (
            f"tiff strip {compression}",
            _tiff(sorted([*small, (259, 3, 1, compression), *strip]), 0, bytes(100)),
        )
    exif = [(*size(8, 8)[0],), (34665, 4, 1, 8), (330, 4, 1, 8)]
    yield (
        "tiff directory in itself",
        _tiff([*size(8, 8), *exif[1:], (273, 4, 1, 8), (279, 4, 1, 64)], 8, bytes(64)),
    )
    yield "tiff of one tag, often", _tiff([*size(8, 8), *[(305, 2, 4, 0)] * 60_000])


def _box(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", 8 + len(payload)) + kind + payload


def _with_box(file: bytes, kind: bytes, payload: bytes) -> bytes:
    """The file with the first box of this kind changed: it keeps its size and begins with `payload`."""
    start = file.index(kind) + 4
    return file[:start] + payload + file[start + len(payload) :]


def _mp4s() -> Iterator[tuple[str, bytes]]:
    good = media_files.video(6, 10, (32, 32), "mp4", "libx264", gop_size=2)
    head = bytes(4)
    for count in (*HUGE, 10**8):
        yield f"stsz of {count} equal samples", _with_box(good, b"stsz", head + struct.pack(">II", 1, count))
        yield f"stts of {count}", _with_box(good, b"stts", head + struct.pack(">III", 1, count, 1))
        yield f"stco of {count}", _with_box(good, b"stco", head + struct.pack(">I", count))
        yield f"stsc of {count}", _with_box(good, b"stsc", head + struct.pack(">IIII", 1, 1, count, 1))
        yield f"edits, {count}", _with_box(good, b"elst", head + struct.pack(">I", count))
        both = _with_box(good, b"stsz", head + struct.pack(">II", 1, count))
        yield (
            f"samples in one chunk, {count}",
            _with_box(both, b"stsc", head + struct.pack(">IIII", 1, 1, count, 1)),
        )
    for duration in (0, 2**31 - 1, 2**32 - 1):
        yield f"frames of {duration}", _with_box(good, b"stts", head + struct.pack(">III", 1, 6, duration))
        yield (
            f"edit of {duration}",
            _with_box(good, b"elst", head + struct.pack(">III", 1, duration, duration)),
        )
        yield f"timescale {duration}", _with_box(good, b"mdhd", head * 3 + struct.pack(">II", duration, 1))
    yield "key frames, billions", _with_box(good, b"stss", head + struct.pack(">I", 2**32 - 1))
    run = _box(b"trun", struct.pack(">II", 0, 2**31))
    fragment = _box(b"moof", _box(b"traf", _box(b"tfhd", struct.pack(">II", 0x20038, 1) + bytes(12)) + run))
    yield "fragment of billions", good + fragment
    deep = b""
    for _ in range(2000):
        deep = _box(b"moov", deep)
    yield "deep boxes", good[:32] + deep
    yield "many boxes", good[:32] + _box(b"free", b"") * 200_000
    yield "box without end", good[:32] + struct.pack(">I", 0) + b"moov" + good[40:]
    yield "box of 64 bits", good[:32] + struct.pack(">I4sQ", 1, b"moov", 2**64 - 1) + good[48:]
    yield "no frames", good[: good.index(b"mdat") - 4] + _box(b"moov", _box(b"trak", b""))
    size = good.index(b"avc1") + 28
    yield "avc1 size", good[:size] + b"\xff\xff\xff\xff" + good[size + 4 :]
    yield "heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + good[24:]
    sizes = media_files.image(16, 16, "AVIF")
    yield "avif as mp4", sizes[:8] + b"isom" + sizes[12:]


def _containers() -> Iterator[tuple[str, bytes]]:
    webm = media_files.video(6, 10, (32, 32), "webm", "libvpx")
    cluster = webm.index(b"\x1f\x43\xb6\x75")
    yield "matroska sizes without end", webm[: cluster + 4] + b"\x01" + b"\xff" * 7 + webm[cluster + 12 :]
    yield "matroska size of exabytes", webm[: cluster + 4] + b"\x01\x7f" + b"\xff" * 6 + webm[cluster + 12 :]
    yield "matroska void", webm[:cluster] + (b"\xec\x80") * 100_000 + webm[cluster:]
    ogg = media_files.audio(0.2, 48000, "ogg")
    second = ogg.index(b"OggS", 4)
    for granule in (2**63 - 1, 2**64 - 1, 2**63):
        yield f"ogg granule {granule}", ogg[: second + 6] + struct.pack("<Q", granule) + ogg[second + 14 :]
    yield (
        "ogg of streams",
        b"".join(ogg[:14] + struct.pack("<I", serial) + ogg[18:second] for serial in range(3000)),
    )
    avi = media_files.video(6, 10, (32, 32), "avi", "mjpeg")
    start = avi.index(b"strh") + 8
    for scale, rate in ((0, 0), (1, 2**32 - 1), (2**32 - 1, 1)):
        yield (
            f"avi rate {rate}/{scale}",
            avi[: start + 20] + struct.pack("<II", scale, rate) + avi[start + 28 :],
        )
    yield (
        "avi index",
        avi[: avi.index(b"idx1") + 4] + struct.pack("<I", 2**32 - 1) + avi[avi.index(b"idx1") + 8 :],
    )
    flv = media_files.video(6, 10, (32, 32), "flv", "flv")
    yield "flv tag of the past", flv[:17] + b"\xff" * 4 + flv[21:]
    yield "transport stream of nothing", (b"G\x1f\xff\x10" + b"\xff" * 184) * 2000


def _sounds() -> Iterator[tuple[str, bytes]]:
    samples = media_files.sine(0.2, 16000).tobytes()
    for rate in (0, 1, 2_000, 768_000, *HUGE):
        yield f"wav rate {rate}", media_files.raw_wav(samples, rate)
    for channels in (0, 3, 64, 65_535):
        yield f"wav of {channels} channels", media_files.raw_wav(samples, channels=channels)
    for size in (0, 1, *HUGE):
        yield f"wav of {size} bytes", media_files.raw_wav(samples, data_bytes=size)
    for bits in (0, 1, 65_535):
        yield f"wav of {bits} bits", media_files.raw_wav(samples, bits=bits)
    for value in ("nan", "inf", "-inf", "1e38"):
        floats = struct.pack("<f", float(value)) * 800
        yield f"wav of {value}", media_files.raw_wav(floats, bits=32, kind=3)
    yield "wav of no samples", media_files.raw_wav(b"")
    yield "wav of one sample", media_files.raw_wav(b"\0\0")
    mp3 = media_files.audio(0.2, 48000, "mp3")
    yield "mp3 tag without end", b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + mp3
    flac = media_files.audio(0.2, 48000, "flac")
    yield "flac of many samples", flac[:21] + b"\x0f" + b"\xff" * 4 + flac[26:]


def _strangers() -> Iterator[tuple[str, bytes]]:
    yield "nothing", b""
    yield "zeros", bytes(1000)
    yield "html", b"<!DOCTYPE html><html><body><img src='file:///etc/passwd'></body></html>"
    yield "svg", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield "zip", b"PK\x03\x04" + bytes(100)
    yield "exe", b"MZ" + bytes(200)
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (w) file\n"
    yield "pdf", b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\n"
    yield "playlist", b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n"
    yield "concat list", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield (
        "session description",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    )
    yield "dash manifest", b'<?xml version="1.0"?><MPD><BaseURL>file:///etc/passwd</BaseURL></MPD>'
    yield "image sequence", b"/etc/%03d.png"
    reference = _box(b"dref", struct.pack(">II", 0, 1) + _box(b"url ", bytes(4) + b"file:///etc/passwd\0"))
    good = media_files.video(6, 10, (32, 32))
    yield "mp4 of another file", good.replace(good[good.index(b"dref") - 4 :][:28], reference[:28])
