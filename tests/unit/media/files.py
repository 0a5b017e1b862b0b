"""Small media files, made on the spot."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
from PIL import Image


def image(width: int = 40, height: int = 30, form: str = "PNG", **options) -> bytes:
    rng = np.random.default_rng(width * 1000 + height)
    pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


def rotated_jpeg(width: int, height: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return image(width, height, "JPEG", exif=exif)


def animation(num_frames: int = 5, form: str = "GIF") -> bytes:
    frames = [Image.new("RGB", (20, 10), (40 * idx, 0, 0)) for idx in range(num_frames)]
    out = io.BytesIO()
    frames[0].save(out, form, save_all=True, append_images=frames[1:], duration=100)
    return out.getvalue()


def video(
    num_frames: int = 20, fps: int = 10, size: tuple[int, int] = (64, 48), form="mp4", codec="mpeg4"
) -> bytes:
    """Frame i is a grey of value 10 i (mod 250)."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, fps)
        for idx in range(num_frames):
            pixels = np.full((size[1], size[0], 3), idx * 10 % 250, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def sideways_video() -> bytes:
    """An mp4 of 64x48 pixels to be shown a quarter turn clockwise; its stored left half is black, the right white."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        pixels = np.zeros((48, 64, 3), np.uint8)
        pixels[:, 32:] = 255
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    data = out.getvalue()
    matrix = data.index(b"tkhd") + 44
    one = 1 << 16
    turned = b"".join(
        value.to_bytes(4, "big", signed=True) for value in (0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    )
    return data[:matrix] + turned + data[matrix + 36 :]


AUDIO_CODECS = {
    "wav": "pcm_s16le", "mp3": "libmp3lame", "mp4": "aac", "ogg": "libopus", "webm": "libopus", "flac": "flac",
}  # fmt: skip


def audio(seconds: float = 1.0, rate: int = 48000, form: str = "wav", channels: int = 1) -> bytes:
    layout = "stereo" if channels == 2 else "mono"
    wave = np.sin(np.arange(round(seconds * rate)) * 440 * 2 * np.pi / rate) * 8000
    samples = np.repeat(wave.astype(np.int16), channels).reshape(1, -1)
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(AUDIO_CODECS[form], rate=rate, layout=layout)
        resampler = av.AudioResampler(
            format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 0
        )
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
        frame.sample_rate = rate
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return out.getvalue()
