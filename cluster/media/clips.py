"""Two kinds of files with moving pictures with the same methods: containers (FFmpeg) and animated images
(Pillow).

A `Clip` says without decoding when its frames are shown (`timeline`), and decodes them in order (`pictures`).
Pillow reads WebP and AVIF, because this FFmpeg reads no animated WebP and only the cover of an AVIF sequence.
FFmpeg reads GIF and APNG.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import av
import msgspec
import numpy as np
from PIL import Image

from cluster.errors import MediaError
from cluster.media.boxes import frame_times
from cluster.media.container import DecodeBudget, first_stream, open_container, picture_decoder
from cluster.media.images import image_format, open_image
from cluster.media.pixels import on_white, to_rgb

LUMA_SIDE = 64  # samples of each row and column in which cuts are looked for, approximately
DEFAULT_FRAME_MS = 100  # duration of an animation's frame that says 0, as in browsers
# pixel formats whose first plane is 8-bit luma
_PLANAR_LUMA = frozenset(
    ("gray", "nv12", "yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p")
)


class Timeline(msgspec.Struct, frozen=True):
    """When frames are shown, in display order."""

    times: tuple[int, ...] | None  # in the file's units; None: the file does not say
    key_idx: tuple[int, ...]  # key frames: stored whole
    num_frames: int
    source_fps: float

    def idx_at(self, time: int | None, position: int) -> int:
        """The frame shown at this time; without times the one at this position."""
        return position if self.times is None or time is None else bisect_left(self.times, time)


class ContainerPicture:
    """One decoded frame, as it is stored."""

    def __init__(self, frame: av.VideoFrame):
        self._frame = frame
        self.time, self.width, self.height = frame.pts, frame.width, frame.height

    @property
    def turns(self) -> int:
        """Quarter turns, counter-clockwise, by which it is rotated for display."""
        return round(self._frame.rotation / 90) % 4

    def rgb(self, width: int, height: int) -> np.ndarray:
        """[height, width, 3] uint8, not rotated."""
        return self._shown().to_ndarray(format="rgb24", width=width, height=height)

    def luma(self) -> np.ndarray:
        """[h, w] uint8: about LUMA_SIDE x LUMA_SIDE samples."""
        if self._frame.format.name in _PLANAR_LUMA:
            plane = self._frame.planes[0]
            rows = np.frombuffer(memoryview(plane), np.uint8, plane.line_size * self.height)
            full = rows.reshape(self.height, plane.line_size)[:, : self.width]
        else:
            full = self._shown().to_ndarray(format="gray")
        return _sparse(full)

    def _shown(self) -> av.VideoFrame:
        """The frame; if it may be transparent, on white."""
        form = self._frame.format
        if not form.has_palette and not any(component.is_alpha for component in form.components):
            return self._frame
        page = on_white(Image.fromarray(self._frame.to_ndarray(format="rgba")))
        return av.VideoFrame.from_ndarray(np.asarray(page), format="rgb24")


class ContainerClip:
    def __init__(self, data: bytes, budget: DecodeBudget):
        self._data = data
        self._budget = budget

    def timeline(self) -> Timeline:
        """Reads all packets and counts each as a frame. `pictures` may yield fewer (VP8's hidden frames)."""
        times, ends, keys = [], [], []
        with open_container(self._data, self._budget) as container:
            stream = first_stream(container, "video", self._budget)
            for packet in container.demux(stream):
                if packet.size and not packet.is_discard:
                    self._budget.take_packet()
                    times.append(packet.pts)
                    ends.append((packet.pts or 0) + (packet.duration or 0))
                    keys.append(packet.is_keyframe)
            if not times:
                raise MediaError("no frames")
            source_fps = _source_fps(stream, times, ends)
            has_times = None not in times
            order = sorted(range(len(times)), key=times.__getitem__) if has_times else range(len(times))
            return Timeline(
                tuple(times[packet_idx] for packet_idx in order) if has_times else None,
                tuple(idx for idx, packet_idx in enumerate(order) if keys[packet_idx]),
                len(times),
                source_fps,
            )

    def pictures(self, *, only_keys: bool = False, num_threads: int = 0) -> Iterator[Picture]:
        """`only_keys`: only packets of key frames reach the decoder. `num_threads` 0: one per CPU."""
        with open_container(self._data, self._budget) as container:
            stream = first_stream(container, "video", self._budget)
            decoder = picture_decoder(stream, self._budget)
            decoder.thread_count = num_threads
            self._check_size(stream.width, stream.height)
            for packet in container.demux(stream):
                if only_keys and packet.size and not packet.is_keyframe:
                    continue
                for frame in decoder.decode(packet if packet.size else None):
                    self._check_size(frame.width, frame.height)
                    yield ContainerPicture(frame)

    def _check_size(self, width: int, height: int) -> None:
        """FFmpeg has the limit as well: for a size far beyond it FFmpeg reports no size and decodes no
        frame."""
        max_pixels = self._budget.limits.max_pixels
        if not 0 < width * height <= max_pixels:
            raise MediaError(f"frames of more than {max_pixels} pixels, or of unknown size, are not accepted")


class AnimationPicture:
    turns = 0

    def __init__(self, image: Image.Image, time: int):
        self._image = image
        self.time = time
        self.width, self.height = image.size

    def rgb(self, width: int, height: int) -> np.ndarray:
        return np.asarray(self._image)

    def luma(self) -> np.ndarray:
        return _sparse(np.asarray(self._image.convert("L")))


class AnimationClip:
    """Every frame counts as a key frame. A still image is a clip of one frame."""

    def __init__(self, data: bytes, budget: DecodeBudget):
        self._data = data
        self._budget = budget

    def timeline(self) -> Timeline:
        max_frames = self._budget.limits.max_packets
        if image_format(self._data) == "WEBP":
            durations, units = _webp_durations(self._data, max_frames), 1000
        else:
            durations, units = frame_times(self._data, max_frames)
        default = max(DEFAULT_FRAME_MS * units // 1000, 1)
        durations = [duration or default for duration in durations] or [default]
        num_frames, total = len(durations), sum(durations)
        times = tuple(accumulate(durations[:-1], initial=0))
        return Timeline(times, tuple(range(num_frames)), num_frames, num_frames * units / total)

    def pictures(self, *, only_keys: bool = False, num_threads: int = 0) -> Iterator[Picture]:
        times = self.timeline().times or ()
        image = open_image(self._data, self._budget).image
        for idx, time in enumerate(times):
            image.seek(idx)
            # a copy, because `seek` draws over the image
            yield AnimationPicture(to_rgb(image.copy()), time)


Picture = ContainerPicture | AnimationPicture
Clip = ContainerClip | AnimationClip


def open_clip(data: bytes, budget: DecodeBudget) -> Clip:
    is_animation = image_format(data) in ("WEBP", "AVIF")
    return AnimationClip(data, budget) if is_animation else ContainerClip(data, budget)


def _webp_durations(data: bytes, max_frames: int) -> list[int]:
    """Display time of each frame in milliseconds; [] for a still image. Raises MediaError."""
    durations: list[int] = []
    start = 12
    while start + 8 <= len(data):
        if len(durations) > max_frames:
            raise MediaError(f"more than {max_frames} frames are not accepted")
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        if data[start : start + 4] == b"ANMF":
            durations.append(int.from_bytes(data[start + 20 : start + 23], "little"))
        start += 8 + size + size % 2
    return durations


def _sparse(luma: np.ndarray) -> np.ndarray:
    height, width = luma.shape
    return luma[:: max(height // LUMA_SIDE, 1), :: max(width // LUMA_SIDE, 1)]


def _source_fps(stream: Any, times: list[int | None], ends: list[int]) -> float:
    """Frames per second over the clip's whole length. If the packets carry no times: the header's rate."""
    known = [time for time in times if time is not None]
    if len(known) == len(times):
        seconds = float((max(ends) - min(known)) * stream.time_base)
        if max(ends) == max(known) and len(times) > 1:
            # the packets have no durations: the last frame is assumed to last as long as the others
            seconds *= len(times) / (len(times) - 1)
        if seconds > 0:
            return len(times) / seconds
    rate = stream.average_rate or stream.guessed_rate
    if not rate or rate <= 0:
        raise MediaError("no frame rate")
    return float(rate)
