"""One image: its header (door) and its pixels (encoder).

The image is rotated by its EXIF orientation and becomes RGB (`pixels`). An opaque image of 8 bits equals what
transformers' `load_image` makes of it; colour profiles are ignored. Magic bytes decide the format, not a
declared type.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator

import msgspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cluster.errors import MediaError
from cluster.media.container import HEIC_BRANDS, DecodeBudget
from cluster.media.pixels import Samples, samples_of, to_rgb
from cluster.media.settings import TRUNCATED

# Broken metadata of a client's file is not worth a log line, and this module has its own limit on pixels.
warnings.filterwarnings("ignore", module="PIL")
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # none of them runs another program
MAX_JPEG_SCANS = 100  # each scan covers the whole image; encoders write about ten
MAX_JPEG_SEGMENTS = 10_000
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # begins a segment; other markers lie inside scans
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that turn an image by a quarter
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_UNUSED = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_PNG_ORIENTATION_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type ")
_PNG_ORIENTATION_MARKS = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type")


class OpenedImage(msgspec.Struct, frozen=True):
    """An image that is not decoded yet. Width and height are those after rotation."""

    image: Image.Image
    width: int
    height: int
    samples: Samples


def image_format(data: bytes) -> str | None:
    """WEBP or AVIF; None for any other format."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "AVIF" if data[4:12] in (b"ftypavif", b"ftypavis") else None


def open_image(data: bytes, budget: DecodeBudget) -> OpenedImage:
    """Raises MediaError, and whatever Pillow raises for broken files."""
    if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS:
        raise MediaError("HEIC is not supported by this build")
    if data.startswith(b"\xff\xd8"):
        _check_jpeg_scans(data)
    if data.startswith(_PNG_SIGNATURE):
        data = _without_comments(data)
    if image_format(data) == "WEBP":
        if len(data) < 8 + int.from_bytes(data[4:8], "little"):
            raise MediaError(f"cannot be decoded: {TRUNCATED}")
        _check_size(*_webp_canvas(data), budget)
    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:
        raise MediaError(f"more than {budget.limits.max_pixels} pixels are not accepted") from error
    except UnidentifiedImageError as error:
        raise MediaError(f"not an image this server can read; it takes {', '.join(IMAGE_FORMATS)}") from error
    width, height = image.size
    _check_size(width, height, budget)
    if _orientation(image, data) in _SIDEWAYS:
        width, height = height, width
    return OpenedImage(image, width, height, samples_of(image, data))


def decode_image(data: bytes, budget: DecodeBudget) -> np.ndarray:
    """[height, width, 3] uint8, read-only."""
    opened = open_image(data, budget)
    image = opened.image
    ImageOps.exif_transpose(image, in_place=True)  # otherwise it is copied in any case
    image = to_rgb(image, opened.samples)
    if image.size != (opened.width, opened.height):
        raise MediaError("its header and its content have different sizes")
    return np.asarray(image)


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF orientation. To look for it after the pixels of a PNG, Pillow decodes the image, so a PNG without
    marks is skipped."""
    if image.format == "PNG" and not any(mark in data for mark in _PNG_ORIENTATION_MARKS):
        return 1
    return image.getexif().get(0x0112, 1)


def _check_size(width: int, height: int, budget: DecodeBudget) -> None:
    if width * height > budget.limits.max_pixels:
        raise MediaError(f"{width}x{height} pixels, more than {budget.limits.max_pixels} are not accepted")


def _check_jpeg_scans(data: bytes) -> None:
    """Refuses images with many scans: a progressive image of a few kilobytes can take minutes. Checks only
    the first image, not the ones that phones append."""
    place, num_scans = 2, 0
    for _ in range(MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(data, place)
        if found is None or data[found.end() - 1] == 0xD9:
            return
        num_scans += data[found.end() - 1] == 0xDA
        if num_scans > MAX_JPEG_SCANS:
            raise MediaError(f"a JPEG of more than {MAX_JPEG_SCANS} scans is not accepted")
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    raise MediaError(f"a JPEG of more than {MAX_JPEG_SEGMENTS} segments is not accepted")


def _without_comments(data: bytes) -> bytes:
    """The same file, or a copy without chunks that say nothing of the picture. Pillow unpacks comments and
    colour profiles, and refuses the whole picture if one of them, or all together, are large. Neither is used
    here. Only what may hold the orientation stays; Pillow's limits apply to it."""
    kept: list[memoryview] = []
    view, start = memoryview(data), 0
    for begin, end in _png_chunks(data):
        if data[begin + 4 : begin + 8] in _PNG_UNUSED and not data.startswith(
            _PNG_ORIENTATION_KEYWORDS, begin + 8
        ):
            kept.append(view[start:begin])
            start = end
    return b"".join((*kept, view[start:])) if kept else data


def _png_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """[begin, end) of each chunk that is complete."""
    begin = len(_PNG_SIGNATURE)
    while begin + 12 <= len(data):
        end = begin + 12 + int.from_bytes(data[begin : begin + 4])
        if end > len(data):
            return
        yield begin, end
        begin = end


def _webp_canvas(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk, before Pillow opens the file and reserves the canvas."""

    def little(start: int, size: int) -> int:
        return int.from_bytes(data[start : start + size], "little")

    match data[12:16]:
        case b"VP8X":
            return little(24, 3) + 1, little(27, 3) + 1
        case b"VP8L":
            bits = little(21, 4)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return little(26, 2) & 0x3FFF, little(28, 2) & 0x3FFF
