"""What a picture looks like to the model: its exact colours, whatever mode and depth the file has."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from bench.trusted_media import decode, probe
from cluster.errors import MediaError
from cluster.media.pixels import to_rgb
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings
from cluster.media.torchvision_compat import ensure_torchvision
from cluster.types.media import FrameStrategy, MediaOptions, Modality

SETTINGS = MediaSettings()
WHITE, INK = (255, 255, 255), (200, 10, 20)
SIDE = 16
GRAY, BLACK = (128, 128, 128), (0, 0, 0)


def saved(image: Image.Image, form: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def icon() -> Image.Image:
    """INK in the right half. The left half is transparent, and of the same colour below that."""
    pixels = np.full((SIDE, SIDE, 4), (*INK, 0), np.uint8)
    pixels[:, SIDE // 2 :, 3] = 255
    return Image.fromarray(pixels)


def noisy_icon() -> Image.Image:
    """As `icon`, with noise below the transparency."""
    pixels = np.asarray(icon()).copy()
    pixels[:, : SIDE // 2, :3] = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE // 2, 3))
    return Image.fromarray(pixels)


def palette_icon() -> Image.Image:
    """Index 0 is transparent, and green below that."""
    indices = np.zeros((SIDE, SIDE), np.uint8)
    indices[:, SIDE // 2 :] = 1
    image = Image.fromarray(indices)
    image.putpalette([0, 255, 0, *INK])  # makes it a P
    return image


def colours(data: bytes, modality: Modality = Modality.IMAGE, options: MediaOptions = DEFAULT_OPTIONS):
    """In the middle of the left half and of the right half; of a clip, those of its first frame."""
    pixels = decode(modality, data, SETTINGS, options)
    picture = pixels if modality is Modality.IMAGE else pixels[0]
    return [tuple(picture[SIDE // 2, column].tolist()) for column in (SIDE // 4, SIDE * 3 // 4)]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(num_bits: int, kind: int, row: bytes, *more: bytes, width: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, 1, num_bits, kind, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + pixels + chunk(b"IEND", b"")


# Transparency


@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True, "exact": True}), ("TIFF", {}), ("AVIF", {"quality": 100})],
)
@pytest.mark.parametrize("draw", [icon, noisy_icon])
def test_a_transparent_picture_lies_on_white(form, options, draw):
    left, right = colours(saved(draw(), form, **options))
    assert left == WHITE
    np.testing.assert_allclose(right, INK, atol=1 if form == "AVIF" else 0)


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_the_transparent_colour_of_a_palette_is_not_seen(form):
    assert colours(saved(palette_icon(), form, transparency=0)) == [WHITE, INK]


def test_a_palette_with_several_transparencies_is_mixed_with_white():
    assert colours(saved(palette_icon(), "PNG", transparency=bytes([51, 255]))) == [(204, 255, 204), INK]


def test_half_transparency_is_mixed_with_white_as_vllm_does_it():
    pixels = np.random.default_rng(1).integers(0, 255, (SIDE, SIDE, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    theirs = Image.new("RGB", image.size, WHITE)  # vllm/multimodal/image.py
    theirs.paste(image, mask=image.split()[3])
    ours = decode(Modality.IMAGE, saved(image, "PNG"), SETTINGS)
    np.testing.assert_array_equal(ours, np.asarray(theirs))
    alpha = pixels[..., 3:].astype(float) / 255
    np.testing.assert_allclose(ours, pixels[..., :3] * alpha + 255 * (1 - alpha), atol=1)


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_every_mode_with_transparency_lies_on_white(mode):
    image = icon().convert("LA").convert("La") if mode == "La" else icon().convert(mode)
    assert image.mode == mode
    shown = np.asarray(to_rgb(image))[SIDE // 2]
    gray = icon().convert("L").getpixel((0, 0))
    assert tuple(shown[0]) == WHITE
    assert tuple(shown[-1]) == ((gray,) * 3 if mode in ("LA", "La") else INK)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_opaque_pixels_keep_their_values(mode):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
    opaque = image.convert("L").convert("LA") if mode == "LA" else image.convert("RGBA")
    expected = np.asarray((image.convert("L") if mode == "LA" else image).convert("RGB"))
    np.testing.assert_array_equal(decode(Modality.IMAGE, saved(opaque, "PNG"), SETTINGS), expected)


@pytest.mark.parametrize(
    ("num_bits", "kind", "row", "transparent", "other"),
    [
        (1, 0, b"\x80", ">H 1", BLACK),
        (2, 0, b"\xc0", ">H 3", BLACK),
        (4, 0, b"\xa0", ">H 10", BLACK),
        (8, 0, b"\x07\x09", ">H 7", (9, 9, 9)),
        (16, 0, struct.pack(">2H", 40_000, 32_768), ">H 40000", GRAY),
        (8, 2, bytes([1, 2, 3, *INK]), ">3H 1 2 3", INK),
        (16, 2, struct.pack(">6H", 40_000, 1, 2, 51_200, 2_560, 5_120), ">3H 40000 1 2", INK),
    ],
)
def test_the_transparent_colour_of_a_png_is_in_its_own_depth(num_bits, kind, row, transparent, other):
    form, *values = transparent.split()
    content = struct.pack(form, *map(int, values))
    pixels = decode(Modality.IMAGE, png(num_bits, kind, row, chunk(b"tRNS", content)), SETTINGS)
    assert [tuple(pixel) for pixel in pixels[0].tolist()] == [WHITE, other]


def bmp(alpha: int) -> bytes:
    """One pixel of 32 bits with a mask for alpha."""
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    info = struct.pack("<IiiHHIIiiII", 108, 1, 1, 1, 32, 3, 4, 0, 0, 0, 0) + masks + bytes(108 - 56)
    place = 14 + len(info)
    return struct.pack("<2sIHHI", b"BM", place + 4, 0, 0, place) + info + bytes([*INK[::-1], alpha])


def test_a_bmp_whose_fourth_byte_is_unused_is_opaque():
    for alpha, shown in ((0, INK), (255, INK), (51, (244, 206, 208))):
        assert tuple(decode(Modality.IMAGE, bmp(alpha), SETTINGS)[0, 0]) == shown


# Clips


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "AVIF"])
@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO])
def test_frames_of_an_animation_lie_on_white(form, modality):
    options = {"WEBP": {"lossless": True, "exact": True}, "GIF": {"disposal": 2}, "AVIF": {"quality": 100}}
    later = Image.fromarray(np.asarray(noisy_icon())[::-1].copy())
    data = saved(
        noisy_icon(), form, save_all=True, append_images=[later], duration=200, **options.get(form, {})
    )
    left, right = colours(data, modality)
    assert left == WHITE
    np.testing.assert_allclose(right, INK, atol=1 if form == "AVIF" else 0)


def clip(codec: str, pixel_format: str, form: str, num_frames: int = 4) -> bytes:
    """The noisy icon, each pixel of it 8 x 8; it becomes its mirror image in the middle."""
    out = io.BytesIO()
    still = np.kron(np.asarray(noisy_icon()), np.ones((8, 8, 1), np.uint8))
    with av.open(out, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=2)
        stream.width = stream.height = 8 * SIDE
        stream.pix_fmt = pixel_format
        for idx in range(num_frames):
            pixels = still if idx < num_frames // 2 else still[:, ::-1].copy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba")))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(
    ("codec", "pixel_format", "form"),
    [("png", "rgba", "mov"), ("prores_ks", "yuva444p10le", "mov"), ("libvpx-vp9", "yuva420p", "webm")],
)
@pytest.mark.parametrize("strategy", [FrameStrategy.UNIFORM, FrameStrategy.SCENES, FrameStrategy.KEYFRAMES])
def test_transparent_frames_of_a_clip_lie_on_white(codec, pixel_format, form, strategy):
    pixels = decode(
        Modality.VIDEO, clip(codec, pixel_format, form), SETTINGS, MediaOptions(strategy=strategy)
    )
    first = pixels[0][4 * SIDE]
    assert tuple(first[8]) == WHITE
    np.testing.assert_allclose(first[-8].astype(int), INK, atol=4)


def test_cuts_are_looked_for_in_what_is_seen():
    """Noise below the transparency changes with every frame; what is seen changes once."""
    data = clip("png", "rgba", "mov", 8)
    options = MediaOptions(strategy=FrameStrategy.SCENES, max_frames=2)
    assert probe(Modality.VIDEO, data, SETTINGS, options).num_frames == 2
    pixels = decode(Modality.VIDEO, data, SETTINGS, options)
    assert tuple(pixels[0][8, 8]) == WHITE and tuple(pixels[-1][8, -8]) == WHITE


# Depth


def gray_file(values: np.ndarray, form: str = "TIFF", photometric: int | None = None) -> bytes:
    """`values`: [left, right]."""
    half = np.ones((SIDE, SIDE // 2), values.dtype)
    image = Image.fromarray(np.concatenate([half * values[0], half * values[1]], axis=1))
    if photometric is None:
        return saved(image, form)
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[262] = photometric
    return saved(image, form, tiffinfo=info)


@pytest.mark.parametrize(
    ("values", "form", "shown"),
    [
        (np.array([32_768, 0], np.uint16), "PNG", [128, 0]),
        (np.array([65_535, 255], np.uint16), "PNG", [255, 0]),
        (np.array([32_768, 0], np.uint16), "TIFF", [128, 0]),
        (np.array([32_768, 0], ">u2"), "TIFF", [128, 0]),
        (np.array([128, 0], np.int32), "TIFF", [128, 0]),
        (np.array([32_768, 0], np.int32), "TIFF", [128, 0]),
        (np.array([2**30, 2**31 - 1], np.int32), "TIFF", [128, 255]),
        (np.array([-100, 100], np.int32), "TIFF", [28, 228]),
        (np.array([0.5, 0], np.float32), "TIFF", [128, 0]),
        (np.array([1, 0.25], np.float32), "TIFF", [255, 64]),
        (np.array([200, 100], np.float32), "TIFF", [255, 128]),
        (np.array([0, -1], np.float32), "TIFF", [128, 0]),
        (np.array([np.nan, 0.5], np.float32), "TIFF", [0, 128]),
        (np.array([np.inf, 0.5], np.float32), "TIFF", [255, 128]),
    ],
)
def test_deep_samples_are_scaled_not_clipped(values, form, shown):
    assert colours(gray_file(values, form)) == [(value,) * 3 for value in shown]


def test_a_deep_picture_whose_white_is_zero_is_not_a_negative():
    data = gray_file(np.array([65_535, 0], np.uint16), photometric=0)
    assert colours(data) == [BLACK, WHITE]


def tiff(num_bits: int, sample_format: int, row: bytes) -> bytes:
    """One row of gray samples, little-endian, not compressed."""
    width = len(row) * 8 // num_bits
    tags = [
        (256, 3, width), (257, 3, 1), (258, 3, num_bits), (259, 3, 1), (262, 3, 1), (273, 4, 8),
        (277, 3, 1), (278, 3, 1), (279, 4, len(row)), (339, 3, sample_format),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    place = 8 + len(row)
    return struct.pack("<2sHI", b"II", 42, place) + row + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("num_bits", "sample_format", "row", "shown"),
    [
        (12, 1, bytes([0x80, 0x00, 0x00]), [128, 0]),
        (16, 2, struct.pack("<2h", 16_384, 0), [128, 0]),
        (16, 2, struct.pack("<2h", -32_768, 0), [0, 128]),
        (32, 1, struct.pack("<2I", 2**32 - 1, 2**31), [255, 128]),
        (32, 2, struct.pack("<2i", -(2**31), 0), [0, 128]),
    ],
)
def test_a_tiff_says_how_deep_its_samples_are(num_bits, sample_format, row, shown):
    pixels = decode(Modality.IMAGE, tiff(num_bits, sample_format, row), SETTINGS)
    assert pixels[0].tolist() == [[value] * 3 for value in shown]


def test_deep_colours_keep_their_high_bytes():
    row = struct.pack(">6H", *(value << 8 for value in (*INK, *GRAY)))
    pixels = decode(Modality.IMAGE, png(16, 2, row), SETTINGS)
    assert [tuple(pixel) for pixel in pixels[0].tolist()] == [INK, GRAY]


def test_deep_colours_with_transparency_lie_on_white():
    row = struct.pack(">8H", 0, 0, 0, 0, *(value << 8 for value in INK), 65_535)
    pixels = decode(Modality.IMAGE, png(16, 6, row), SETTINGS)
    assert [tuple(pixel) for pixel in pixels[0].tolist()] == [WHITE, INK]


@pytest.mark.parametrize("mode", ["1", "CMYK", "LAB", "YCbCr"])
def test_other_opaque_modes_are_as_transformers_loads_them(mode):
    ensure_torchvision()
    from transformers.image_utils import load_image

    image = icon().convert("RGB")
    image = Image.new("LAB", image.size, (140, 180, 90)) if mode == "LAB" else image.convert(mode)
    data = saved(image, "TIFF")
    assert Image.open(io.BytesIO(data)).mode == mode
    theirs = np.asarray(load_image(base64.b64encode(data).decode()))
    np.testing.assert_array_equal(decode(Modality.IMAGE, data, SETTINGS), theirs)


# Files that are cut, and what stands beside the picture


@pytest.mark.parametrize(
    ("form", "num_missing"),
    [
        ("JPEG", 3),
        ("JPEG", 300),
        ("PNG", 100),
        ("GIF", 100),
        ("BMP", 3),
        ("TIFF", 3),
        ("WEBP", 3),
        ("AVIF", 3),
    ],
)
def test_a_truncated_file_is_called_truncated(form, num_missing):
    pixels = np.random.default_rng(3).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(pixels), form)
    with pytest.raises(MediaError, match=r"item 2 \(image\): cannot be decoded: the file is truncated"):
        decode(Modality.IMAGE, data[:-num_missing], SETTINGS, item_idx=2)


def test_what_is_wrong_with_a_file_is_said_without_names_of_classes():
    broken = bytearray(saved(icon(), "PNG"))
    broken[60] ^= 0xFF
    sound_of_zeros = b"ID3" + bytes(400)
    for modality, data in ((Modality.IMAGE, bytes(broken)), (Modality.AUDIO, sound_of_zeros)):
        with pytest.raises(MediaError, match="its content is damaged, or of a kind") as caught:
            decode(modality, data, SETTINGS)
        assert "Error" not in caught.value.message and "0x" not in caught.value.message


BOMB = zlib.compress(bytes(3 << 20))
COMMENTS = {
    "compressed text": (b"zTXt", b"Comment\0\0" + BOMB),
    "international text": (b"iTXt", b"Comment\0\1\0\0\0" + BOMB),
    "text": (b"tEXt", b"Comment\0" + b"a" * (3 << 20)),
    "colour profile": (b"iCCP", b"x\0\0" + BOMB),
}


@pytest.mark.parametrize("name", COMMENTS)
@pytest.mark.parametrize("is_behind", [False, True])
def test_comments_of_a_png_do_not_hide_its_picture(name, is_behind):
    comment = chunk(*COMMENTS[name])
    plain = png(8, 2, bytes([*INK, *GRAY]))
    place = len(plain) - 12 if is_behind else 33
    data = plain[:place] + comment * (70 if len(comment) < 1 << 16 else 3) + plain[place:]
    assert probe(Modality.IMAGE, data, SETTINGS).width == 2
    assert [tuple(pixel) for pixel in decode(Modality.IMAGE, data, SETTINGS)[0].tolist()] == [INK, GRAY]


def test_an_orientation_that_unpacks_to_much_is_named():
    data = png(8, 2, bytes([*INK, *GRAY]), chunk(b"zTXt", b"Raw profile type exif\0\0" + BOMB))
    with pytest.raises(MediaError, match="its metadata take more than 1 MiB when they are unpacked"):
        decode(Modality.IMAGE, data, SETTINGS)
