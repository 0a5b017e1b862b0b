"""Small media files, made on the spot, for tests and for `bench.fuzz_media`."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

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


def animation(num_frames: int = 5, form: str = "GIF", duration: int | list[int] = 100) -> bytes:
    """Frame i is a red of value 40 i. `duration` is in milliseconds."""
    frames = [Image.new("RGB", (20, 10), (40 * idx, 0, 0)) for idx in range(num_frames)]
    options = {"lossless": True} if form == "WEBP" else {}
    out = io.BytesIO()
    frames[0].save(out, form, save_all=True, append_images=frames[1:], duration=duration, **options)
    return _without_times(out.getvalue()) if form == "AVIF" else out.getvalue()


def _without_times(file: bytes) -> bytes:
    """An AVIF sequence without the hour of its making, so that it is the same every time."""
    for kind in (b"mvhd", b"tkhd", b"mdhd"):
        start = file.index(kind) + 8  # behind version and flags: two times of 8 bytes
        file = file[:start] + bytes(16) + file[start + 16 :]
    return file


def video(
    num_frames: int = 20,
    fps: int = 10,
    size: tuple[int, int] = (64, 48),
    form: str = "mp4",
    codec: str = "mpeg4",
    gop_size: int | None = None,
) -> bytes:
    """Frame i is a grey of value 10 i (mod 250)."""
    greys = [np.full((size[1], size[0], 3), idx * 10 % 250, np.uint8) for idx in range(num_frames)]
    return video_of(greys, fps, form, codec, gop_size)


def video_of(
    frames: Sequence[np.ndarray],
    fps: int = 10,
    form: str = "mp4",
    codec: str = "mpeg4",
    gop_size: int | None = None,
    sound_s: float = 0.0,
) -> bytes:
    """[height, width, 3] uint8 each; every `gop_size`th is stored whole; with a sound track of so many
    seconds.
    """
    out = io.BytesIO()
    with av.open(out, "w", format=form, options=SAME_EVERY_TIME) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, fps)
        if gop_size is not None:
            stream.codec_context.gop_size = gop_size
        sound: Any = container.add_stream("aac", rate=48000, layout="mono") if sound_s else None
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if sound is not None:
            _add_sound(container, sound, sine(sound_s, 48000), 48000, "mono")
    return out.getvalue()


def slow_video(num_frames: int, size: tuple[int, int] = (1920, 1080), fps: int = 25) -> bytes:
    """Small to send and slow to decode: the same two black seconds again and again. About a millisecond a
    frame.
    """
    period = 2 * fps
    black = av.VideoFrame.from_ndarray(np.zeros((size[1], size[0], 3), np.uint8), format="rgb24")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options=SAME_EVERY_TIME) as container:
        stream: Any = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.gop_size = period
        packets = [packet for _ in range(period) for packet in stream.encode(black)]
        packets += stream.encode(None)
        for number in range(num_frames):
            packet = av.Packet(bytes(packets[number % period]))
            packet.stream, packet.time_base = stream, stream.codec_context.time_base
            packet.pts = packet.dts = number
            packet.is_keyframe = number % period == 0
            container.mux(packet)
    return out.getvalue()


def scenes(*lengths: int) -> list[np.ndarray]:
    """Scenes of so many frames, 64x48: a bright patch wanders over a ground that gets brighter from scene to
    scene.
    """
    frames = []
    for scene, length in enumerate(lengths):
        for step in range(length):
            pixels = np.full((48, 64, 3), 20 + 60 * scene, np.uint8)
            pixels[10:20, step : step + 10] = 250
            frames.append(pixels)
    return frames


def sideways_video() -> bytes:
    """An mp4 of 64x48 pixels to be shown a quarter turn clockwise; its stored left half is black, the right
    white.
    """
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


SAME_EVERY_TIME = {"fflags": "+bitexact"}  # no random identifiers in the files
AUDIO_CODECS = {
    "wav": "pcm_s16le", "mp3": "libmp3lame", "mp4": "aac", "ogg": "libopus", "webm": "libopus", "flac": "flac",
    "adts": "aac", "aiff": "pcm_s16be", "caf": "pcm_s16be", "au": "pcm_s16be", "asf": "libmp3lame",
}  # fmt: skip


def sine(seconds: float, rate: int) -> np.ndarray:
    """[num_samples] int16, 440 Hz."""
    return (np.sin(np.arange(round(seconds * rate)) * 440 * 2 * np.pi / rate) * 8000).astype(np.int16)


def audio(seconds: float = 1.0, rate: int = 48000, form: str = "wav", channels: int = 1) -> bytes:
    layout = "stereo" if channels == 2 else "mono"
    out = io.BytesIO()
    with av.open(out, "w", format=form, options=SAME_EVERY_TIME) as container:
        stream: Any = container.add_stream(AUDIO_CODECS[form], rate=rate, layout=layout)
        _add_sound(container, stream, np.repeat(sine(seconds, rate), channels), rate, layout)
    return out.getvalue()


def _add_sound(container: Any, stream: Any, samples: np.ndarray, rate: int, layout: str) -> None:
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
    frame.sample_rate = rate
    resampler = av.AudioResampler(
        format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 0
    )
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        container.mux(stream.encode(piece))
    container.mux(stream.encode(None))


def raw_wav(
    samples: bytes,
    rate: int = 16000,
    channels: int = 1,
    bits: int = 16,
    kind: int = 1,
    data_bytes: int | None = None,
) -> bytes:
    """A WAV file whose header says what the arguments say. `kind`: 1 for integers, 3 for floats."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * block % 2**32, block % 2**16, bits)
    size = len(samples) if data_bytes is None else data_bytes
    return (
        b"RIFF"
        + struct.pack("<I", (36 + size) % 2**32)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", size)
        + samples
    )
