"""Round trips through the file formats that users send (JPEG, h264 in mp4) and the processor's resizing."""

import io
import math
import random
import wave

import av
import numpy as np
from PIL import Image

from deploy.demo_model.training.speech import SAMPLE_RATE

PATCH_SIDE = 16
MIN_PIXELS = 64 * 64
MAX_PIXELS = 128 * 128
SOURCE_SIZES = ((50, 70), (100, 80), (120, 160), (160, 120), (200, 200), (240, 320), (150, 300))


def png_bytes(pixels: np.ndarray) -> bytes:
    """A PNG file of [H, W, 3] uint8."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def to_16_bit(samples: np.ndarray) -> np.ndarray:
    """[-1, 1] float -> int16."""
    return np.clip(np.round(samples * 32768), -32768, 32767).astype(np.int16)


def wav_bytes(samples: np.ndarray) -> bytes:
    """A mono 16-bit WAV file at 16 kHz; samples on the 16-bit grid survive unchanged."""
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(SAMPLE_RATE)
        wav.writeframes(to_16_bit(samples).tobytes())
    return file.getvalue()


def jpeg_bytes(pixels: np.ndarray, quality: int) -> bytes:
    """A JPEG file of [H, W, 3] uint8 with Pillow's default 4:2:0 chroma."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    """What a JPEG of the pixels decodes to."""
    return np.asarray(Image.open(io.BytesIO(jpeg_bytes(pixels, quality))).convert("RGB"))


def mp4_bytes(frames: np.ndarray, frames_per_second: int = 4, quality: int = 23) -> bytes:
    """An h264 mp4 file (yuv420p) of [T, H, W, 3] uint8; `quality` is x264's constant rate factor."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=frames_per_second)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(quality), "threads": "1"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def decode_mp4(file: bytes) -> np.ndarray:
    """Every frame, [T, H, W, 3] uint8."""
    with av.open(io.BytesIO(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def processor_size(height: int, width: int) -> tuple[int, int]:
    """The size to which the demo model's image processor brings an image (its smart resize)."""
    new_height, new_width = round(height / PATCH_SIDE) * PATCH_SIDE, round(width / PATCH_SIDE) * PATCH_SIDE
    if new_height * new_width > MAX_PIXELS:
        scale = math.sqrt(height * width / MAX_PIXELS)
        new_height, new_width = (
            max(PATCH_SIDE, math.floor(side / scale / PATCH_SIDE) * PATCH_SIDE) for side in (height, width)
        )
    elif new_height * new_width < MIN_PIXELS:
        scale = math.sqrt(MIN_PIXELS / (height * width))
        new_height, new_width = (
            math.ceil(side * scale / PATCH_SIDE) * PATCH_SIDE for side in (height, width)
        )
    return new_height, new_width


def fit(pixels: np.ndarray) -> np.ndarray:
    """The pixels at the processor's size (bicubic)."""
    height, width = processor_size(*pixels.shape[:2])
    if (height, width) == pixels.shape[:2]:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def disturb_image(rng: random.Random, pixels: np.ndarray) -> np.ndarray:
    """Every third image goes through JPEG."""
    return through_jpeg(pixels, rng.randrange(50, 96)) if rng.random() < 0.33 else pixels


def disturb_video(rng: random.Random, frames: np.ndarray) -> np.ndarray:
    """Every third clip gets chroma subsampling and block noise frame by frame, a cheap stand-in for h264."""
    if rng.random() > 0.33:
        return frames
    quality = rng.randrange(40, 96)
    return np.stack([through_jpeg(frame, quality) for frame in frames])
