"""Bytes to arrays: one RGB image, sampled RGB frames, one mono waveform.

`probe` and `decode` share the functions that decide size and length, so their answers cannot differ:
* image: size of the first frame after EXIF orientation;
* video: frames are planned from the packets' timestamps without decoding (`plan_video`); a planned frame is the last
  one shown at its time, so the number of frames is the plan's even where some packets show nothing (VP8's hidden
  frames) or two share a time;
* audio: no header is exact after resampling, so both decode the whole clip; it is short by the settings' cap.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import av
import msgspec
import numpy as np
from av.container import InputContainer
from PIL import Image, ImageOps

from cluster.errors import MediaError
from cluster.media.container import open_container
from cluster.media.settings import MediaSettings, VideoSampling, naming
from cluster.types.media import Modality

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the cap in `open_image` is ours
SAMPLE_RATES = range(2_000, 768_001)  # Hz; outside, resampling makes too much of too little, or too slowly
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # none of them runs another program


class DecodedMedia(msgspec.Struct, frozen=True):
    """Image: [H, W, 3] uint8. Video: [T, H, W, 3] uint8. Audio: [num_samples] float32."""

    modality: Modality
    array: np.ndarray
    fps: float = 0.0  # video: frames per second of these frames


class VideoPlan(msgspec.Struct, frozen=True):
    """Which frames to take, known before any frame but the first is decoded."""

    shown_at: tuple[
        int | None, ...
    ]  # presentation time of each frame in stream units; None: no times in this stream
    frame_idx: tuple[int, ...]  # its place among all frames
    fps: float
    width: int  # after rotation
    height: int
    rotation: int  # quarter turns, counter-clockwise


def decode(
    modality: Modality, data: bytes, settings: MediaSettings, *, item_idx: int | None = 0
) -> DecodedMedia:
    """Blocks for as long as decoding takes. Raises MediaError."""
    with naming(modality, item_idx):
        match modality:
            case Modality.IMAGE:
                return DecodedMedia(modality, decode_image(data, settings))
            case Modality.VIDEO:
                frames, fps = decode_video(data, settings)
                return DecodedMedia(modality, frames, fps)
            case Modality.AUDIO:
                return DecodedMedia(modality, decode_audio(data, settings))


def open_image(data: bytes, settings: MediaSettings) -> tuple[Image.Image, int, int]:
    """The image, nothing of it decoded yet, and its width and height after EXIF orientation."""
    image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    width, height = image.size
    if width * height > settings.limits.max_pixels:
        raise MediaError(f"{width}x{height} pixels, more than {settings.limits.max_pixels} are not accepted")
    if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # orientations that turn the image on its side
        width, height = height, width
    return image, width, height


def decode_image(data: bytes, settings: MediaSettings) -> np.ndarray:
    image, width, height = open_image(data, settings)
    image = ImageOps.exif_transpose(image).convert("RGB")
    if image.size != (width, height):
        raise MediaError("its header and its content disagree about the size")
    return np.asarray(image)


def sample_frames(num_frames: int, source_fps: float, sampling: VideoSampling) -> list[int]:
    """Indices of the frames to take: transformers' `sample_frames`, and at least one frame of very short clips."""
    wanted = min(
        max(num_frames / source_fps * sampling.fps, sampling.min_frames), sampling.max_frames, num_frames
    )
    wanted = max(int(wanted // sampling.multiple) * sampling.multiple, min(num_frames, sampling.multiple))
    return [idx * num_frames // wanted for idx in range(wanted)]


def plan_video(data: bytes, settings: MediaSettings) -> VideoPlan:
    """Reads all packets (no decoding) and decodes the first frame, for its true size and rotation."""
    with open_container(data) as container:
        stream = _first_stream(container, "video")
        times, ends = [], []
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                times.append(packet.pts)
                ends.append((packet.pts or 0) + (packet.duration or 0))
        if not times:
            raise MediaError("no frames")
        source_fps = _source_fps(stream, times, ends)
    if len(times) / source_fps > settings.limits.max_video_s:
        raise MediaError(f"longer than {settings.limits.max_video_s:g} seconds")
    with open_container(data) as container:
        first = next(_video_frames(container, settings), None)
        if first is None:
            raise MediaError("no frame can be decoded")
        turns = round(first.rotation / 90) % 4
        width, height = (first.height, first.width) if turns % 2 else (first.width, first.height)
    indices = sample_frames(len(times), source_fps, settings.video)
    if len(indices) * width * height > settings.limits.max_video_pixels:
        raise MediaError(
            f"{len(indices)} frames of {width}x{height}, together more than {settings.limits.max_video_pixels} pixels"
        )
    shown = [None] * len(indices) if None in times else [sorted(times)[idx] for idx in indices]
    fps = len(indices) / len(times) * source_fps
    return VideoPlan(tuple(shown), tuple(indices), fps, width, height, turns)


def decode_video(data: bytes, settings: MediaSettings) -> tuple[np.ndarray, float]:
    plan = plan_video(data, settings)
    width, height = (plan.height, plan.width) if plan.rotation % 2 else (plan.width, plan.height)
    taken: list[np.ndarray] = []
    last: av.VideoFrame | None = None

    def take(frame: av.VideoFrame) -> None:
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
        taken.append(np.rot90(pixels, plan.rotation))

    with open_container(data) as container:
        for position, frame in enumerate(_video_frames(container, settings)):
            while (
                len(taken) < len(plan.frame_idx)
                and last is not None
                and _is_after(frame, position, plan, len(taken))
            ):
                take(last)
            last = frame
            if len(taken) == len(plan.frame_idx):
                break
    if last is None:
        raise MediaError("no frame can be decoded")
    while len(taken) < len(plan.frame_idx):
        take(last)
    return np.ascontiguousarray(np.stack(taken)), plan.fps


def decode_audio(data: bytes, settings: MediaSettings) -> np.ndarray:
    """The first audio stream, mixed to mono and resampled. Refuses what is longer than the settings' cap."""
    cap = settings.audio_cap()
    pieces: list[np.ndarray] = []
    num_samples = 0
    with open_container(data) as container:
        stream = _first_stream(container, "audio")
        resampler = av.AudioResampler(format="flt", layout="mono", rate=settings.sampling_rate)

        def resampled() -> Iterator[av.AudioFrame]:
            for frame in container.decode(stream):
                if frame.sample_rate not in SAMPLE_RATES:
                    raise MediaError(f"a sampling rate of {frame.sample_rate} Hz is not accepted")
                frame.pts = None  # gaps in the times are not filled: the samples are what counts
                yield from resampler.resample(frame)
            yield from resampler.resample(None)

        for frame in resampled():
            piece = frame.to_ndarray().reshape(-1)
            pieces.append(piece)
            num_samples += len(piece)
            if num_samples > cap:
                raise MediaError(
                    f"longer than {cap / settings.sampling_rate:g} seconds, the most this server takes"
                )
    if not num_samples:
        raise MediaError("no audio samples")
    waveform = np.concatenate(pieces).astype(np.float32, copy=False)
    if not np.isfinite(waveform).all():
        raise MediaError("samples that are not finite numbers")
    return waveform


def _first_stream(container: InputContainer, kind: str) -> Any:  # PyAV types audio and video streams apart
    streams = container.streams.video if kind == "video" else container.streams.audio
    if not streams:
        raise MediaError(f"no {kind} stream")
    return streams[0]


def _video_frames(container: InputContainer, settings: MediaSettings) -> Iterator[av.VideoFrame]:
    stream = _first_stream(container, "video")
    context = stream.codec_context
    for frame in container.decode(stream):
        if max(frame.width * frame.height, context.width * context.height) > settings.limits.max_pixels:
            raise MediaError(f"frames of more than {settings.limits.max_pixels} pixels are not accepted")
        yield frame


def _source_fps(stream: Any, times: list[int | None], ends: list[int]) -> float:
    """Frames per second over the clip's whole length; the header's rate where the packets carry no times."""
    known = [time for time in times if time is not None]
    if len(known) == len(times):
        seconds = float((max(ends) - min(known)) * stream.time_base)
        if (
            max(ends) == max(known) and len(times) > 1
        ):  # no durations: the last frame lasts as long as the others
            seconds *= len(times) / (len(times) - 1)
        if seconds > 0:
            return len(times) / seconds
    rate = stream.average_rate or stream.guessed_rate
    if not rate or rate <= 0:
        raise MediaError("no frame rate")
    return float(rate)


def _is_after(frame: av.VideoFrame, position: int, plan: VideoPlan, nth: int) -> bool:
    """Whether this frame is shown after the plan's nth time, so that the frame before it was the one on screen."""
    shown_at = plan.shown_at[nth]
    if shown_at is None or frame.pts is None:
        return position > plan.frame_idx[nth]
    return frame.pts > shown_at
