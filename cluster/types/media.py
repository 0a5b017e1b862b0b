"""What one image, clip or sound is to the rest of the system. No pixels, no tensors, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class FrameStrategy(StrEnum):
    """Which frames of a video are looked at."""

    UNIFORM = "uniform"  # at equal distances over the whole clip
    KEYFRAMES = "keyframes"  # those that the encoder of the file stored whole
    SCENES = "scenes"  # the first frame after each cut, then at equal distances


class MediaOptions(msgspec.Struct, frozen=True):
    """How a client wants one item to be looked at. The defaults leave everything to the model's own processor."""

    min_pixels: int | None = None  # of an image, or of each frame of a video, after resizing
    max_pixels: int | None = None
    strategy: FrameStrategy = FrameStrategy.UNIFORM
    fps: float | None = None  # frames to take of each second
    min_frames: int | None = None
    max_frames: int | None = None
    audio_in_video: bool = False  # the clip's sound track is heard, too
    temporal_pooling: int = 1  # so many neighbouring patches in time become one embedding row, their mean
    spatial_pooling: int = (
        1  # so many times so many neighbouring patches become one embedding row, their mean
    )


class MediaProbe(msgspec.Struct, frozen=True):
    """What a header says, before anything is decoded."""

    modality: Modality
    width: int = 0  # pixels, after EXIF orientation; 0 for audio
    height: int = 0
    num_frames: int = 0  # frames that will be sampled from a video (its `fps` belongs to these frames)
    fps: float = 0.0  # frames per second of the sampled frames
    num_samples: int = 0  # audio samples at the model's sampling rate
    frame_idx: tuple[int, ...] = ()  # of the sampled frames, among all frames of the video
    source_fps: float = 0.0  # frames per second of the video itself
    num_source_frames: int = 0


class MediaGeometry(msgspec.Struct, frozen=True):
    """What the language half must know of an item before its embeddings exist: token count and position data."""

    num_tokens: int  # placeholder tokens, equal to embedding rows
    grid_thw: tuple[int, int, int] | None = None  # vision patches (time, height, width) before merging
    second_per_grid: float | None = None  # video: seconds covered by one temporal patch
    num_mel_frames: int | None = None  # audio: valid feature frames


class MediaLayout(msgspec.Struct, frozen=True):
    """What stands in a prompt for one item as the client sent it: text of the model's own, and in it the item's embedding rows."""

    text: str  # replaces the item's placeholder; each run of row tokens is cut to one token
    runs: tuple[tuple[int, int], ...]  # of each such token, in order: (index in `parts`, rows of the run)
    parts: tuple[tuple[Modality, MediaGeometry], ...]  # the item; behind a clip that is heard its sound track

    @property
    def modality(self) -> Modality:
        return self.parts[0][0]

    @property
    def geometry(self) -> MediaGeometry:
        """Of the item itself."""
        return self.parts[0][1]


class MediaItem(msgspec.Struct, frozen=True):
    """One item as it came in: the bytes, what they are, and the name they go by in every cache."""

    modality: Modality
    data: bytes  # the original file's bytes, already checked against the size cap
    media_hash: str  # content hash of bytes, processor settings, options and tenant
    geometry: MediaGeometry
    options: MediaOptions = MediaOptions()
    is_returning: bool = False  # an earlier turn of the conversation showed it

    num_encoded_rows: int | None = None  # before pooling; None: nothing is known but its geometry

    @property
    def num_call_rows(self) -> int:
        """Rows that the encoder computes, before pooling: what the item costs. Where that is not known, an estimate from above."""
        if self.num_encoded_rows is not None:
            return self.num_encoded_rows
        return self.geometry.num_tokens * self.options.temporal_pooling * self.options.spatial_pooling**2


class PlacedMedia(msgspec.Struct, frozen=True):
    """One item in a prompt: its embedding rows stand, in order, in its placeholder ranges. Text may lie between them, and
    another item's ranges (a clip and its sound track)."""

    modality: Modality
    media_hash: str
    ranges: tuple[tuple[int, int], ...]  # (offset, length) in the prompt's token ids; ascending, none empty
    geometry: MediaGeometry

    @property
    def offset(self) -> int:
        """The first placeholder token."""
        return self.ranges[0][0]

    @property
    def end(self) -> int:
        """Behind the last placeholder token."""
        return sum(self.ranges[-1])

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(token, row, count) of each run of its rows that stands in the tokens [start, end)."""
        row = 0
        for offset, length in self.ranges:
            low, high = max(start, offset), min(end, offset + length)
            if low < high:
                yield low, row + low - offset, high - low
            row += length

    def first_range_after(self, token: int) -> int | None:
        """Where its first range that is not wholly before `token` starts; None: all are."""
        return next((offset for offset, length in self.ranges if offset + length > token), None)
