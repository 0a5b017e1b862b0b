"""A picture in any of Pillow's modes → RGB of 8 bits, as it looks on a white page.

* **Transparency.** The picture is laid on white, as vLLM does it. Pillow's own conversion drops the alpha
  channel and shows whatever colour the file keeps below it.
* **Depth.** Pillow's own conversion clips samples of more than 8 bits. Here a range is mapped to 0…255:

  - integers of up to 16 bits: the full range of the file's type; of a signed type without a negative value
    its upper half;
  - integers of 32 bits: the full range of the narrowest type that holds all values, because such files are
    nearly always pictures of 8 or 16 bits that a program has widened;
  - floats: 0…1, as image programs write them, widened to the values that the picture has.
"""

from __future__ import annotations

import msgspec
import numpy as np
from PIL import Image

WHITE = (255, 255, 255)
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
_PNG_DEPTH_AT = 24


class Samples(msgspec.Struct, frozen=True):
    """How a file stores its samples, as far as Pillow's mode does not say it."""

    num_bits: int = 8
    is_signed: bool = False
    is_white_zero: bool = False


EIGHT_BITS = Samples()


def samples_of(image: Image.Image, data: bytes) -> Samples:
    """The samples of an image that is opened from these bytes."""
    if image.format == "PNG":
        return Samples(data[_PNG_DEPTH_AT])
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return EIGHT_BITS
    return Samples(
        tags.get(_BITS_PER_SAMPLE, (1,))[0],
        is_signed=tags.get(_SAMPLE_FORMAT, (1,))[0] == 2,
        is_white_zero=tags.get(_PHOTOMETRIC) == 0,
    )


def to_rgb(image: Image.Image, samples: Samples = EIGHT_BITS) -> Image.Image:
    """The image itself if it is RGB already."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _gray(image, samples)
    elif image.format == "PNG" and "transparency" in image.info and image.mode in ("L", "RGB"):
        image.info["transparency"] = _in_eight_bits(image.info["transparency"], samples.num_bits)
    if image.has_transparency_data:
        return on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def on_white(image: Image.Image) -> Image.Image:
    """RGB. The image has transparent pixels, in whatever way its mode says it."""
    if image.mode != "RGBA":
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    if image.format == "BMP" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")  # many programs leave the fourth byte of a pixel zero
    page = Image.new("RGB", image.size, WHITE)
    page.paste(image, mask=image)
    return page


def _in_eight_bits(colour: int | tuple[int, ...] | bytes, num_bits: int) -> int | tuple[int, ...] | bytes:
    """A PNG's transparent colour, which the file says in its own depth, in the depth of Pillow's pixels."""

    def scaled(value: int) -> int:
        return value >> (num_bits - 8) if num_bits > 8 else value * 255 // (2**num_bits - 1)

    match colour:
        case int():
            return scaled(colour)
        case tuple():
            return tuple(map(scaled, colour))
    return colour


def _gray(image: Image.Image, samples: Samples) -> Image.Image:
    """L; or LA, if one of the values is transparent."""
    values = np.asarray(image)
    match image.mode:
        case "F":
            gray = _of_floats(values)
        case "I":
            gray = _of_integers(values if samples.is_signed else values.view(np.uint32), samples)
        case _:
            gray = _scaled(values, 0, 1 << samples.num_bits)
    shown = Image.fromarray(255 - gray if samples.is_white_zero else gray)
    if "transparency" in image.info:
        shown.putalpha(
            Image.fromarray(np.where(values == image.info["transparency"], np.uint8(0), np.uint8(255)))
        )
    return shown


def _of_integers(values: np.ndarray, samples: Samples) -> np.ndarray:
    least, largest = int(values.min()), int(values.max())
    kind = np.dtype(np.int16)
    if samples.num_bits > 16:
        narrowest = np.min_scalar_type(largest if least >= 0 else min(least, -1 - largest))
        kind = narrowest if narrowest.itemsize < 4 else values.dtype
    return _scaled(values, np.iinfo(kind).min if least < 0 else 0, np.iinfo(kind).max + 1)


def _of_floats(values: np.ndarray) -> np.ndarray:
    """Values that are no numbers become black."""
    finite = values[np.isfinite(values)]
    black, white = float(finite.min(initial=0)), float(finite.max(initial=1))
    return _scaled(np.nan_to_num(values, nan=black, posinf=white, neginf=black), black, white)


def _scaled(values: np.ndarray, black: float, end: float) -> np.ndarray:
    """uint8: 256 equal steps from `black` to `end`."""
    steps = (values.astype(np.float32) - np.float32(black)) * np.float32(256 / (end - black))
    return np.minimum(steps, 255).astype(np.uint8)
