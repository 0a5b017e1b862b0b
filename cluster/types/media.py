"""One image, clip or sound as the rest of the system sees it. No pixels, no tensors, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class FrameStrategy(StrEnum):
    """Which frames of a video the model gets."""

    UNIFORM = "uniform"  # at equal distances over the whole clip
    KEYFRAMES = "keyframes"  # frames that the file stores whole
    SCENES = "scenes"  # the first frame after each cut, then at equal distances


class MediaOptions(msgspec.Struct, frozen=True):
    """A client's wishes for one item. The defaults leave everything to the model's own processor."""

    min_pixels: int | None = None  # of an image, or of each frame of a video, after resizing
    max_pixels: int | None = None
    strategy: FrameStrategy = FrameStrategy.UNIFORM
    fps: float | None = None  # frames to take per second
    min_frames: int | None = None
    max_frames: int | None = None
    audio_in_video: bool = False  # the model also hears the clip's sound track
    temporal_pooling: int = 1  # neighbouring rows in time whose mean becomes one embedding row
    spatial_pooling: int = 1  # side of the square of neighbouring rows whose mean becomes one embedding row


class MediaProbe(msgspec.Struct, frozen=True):
    """Size and length of an item, known before it is decoded for the model."""

    modality: Modality
    width: int = 0  # pixels, after EXIF orientation; 0 for audio
    height: int = 0
    num_frames: int = 0  # frames that will be sampled from a video; `fps` is the rate of these frames
    fps: float = 0.0  # frames per second of the sampled frames
    num_samples: int = 0  # audio samples at the model's sampling rate
    frame_idx: tuple[int, ...] = ()  # indices of the sampled frames among all frames of the video
    source_fps: float = 0.0  # frames per second of the video itself
    num_source_frames: int = 0


class MediaGeometry(msgspec.Struct, frozen=True):
    """What the language half needs to know of an item before its embeddings exist: token count and position
    data."""

    num_tokens: int  # placeholder tokens; as many as embedding rows
    grid_thw: tuple[int, int, int] | None = None  # vision patches (time, height, width) before merging
    second_per_grid: float | None = None  # video: seconds covered by one temporal patch
    num_mel_frames: int | None = None  # audio: valid feature frames


class MediaLayout(msgspec.Struct, frozen=True):
    """What replaces one item in a prompt: text in the model's own format, and in it places for the item's
    embedding rows."""

    text: str  # replaces the item's placeholder; each run of row tokens is shortened to one token
    runs: tuple[tuple[int, int], ...]  # for each such token, in order: (index in `parts`, rows of the run)
    # the item; for a clip that is heard, also its sound track
    parts: tuple[tuple[Modality, MediaGeometry], ...]

    @property
    def modality(self) -> Modality:
        return self.parts[0][0]

    @property
    def geometry(self) -> MediaGeometry:
        """Geometry of the item itself, without its sound track."""
        return self.parts[0][1]


class MediaItem(msgspec.Struct, frozen=True):
    """One item as the client sent it: the bytes, their modality, and their key in every cache."""

    modality: Modality
    data: bytes  # the original file's bytes, already checked against the size cap
    media_hash: str  # content hash of bytes, processor settings, options and tenant
    geometry: MediaGeometry
    options: MediaOptions = MediaOptions()
    is_returning: bool = False  # an earlier turn of the conversation contained it
    num_encoded_rows: int | None = None  # before pooling; None: only the geometry is known
    item_idx: int = 0  # among the items of the client's request; a clip and its sound track are one
    param: str = "messages"  # the request field that contained it

    @property
    def num_call_rows(self) -> int:
        """Rows that the encoder computes, before pooling: the cost of the item. An upper bound if the number
        is not known."""
        if self.num_encoded_rows is not None:
            return self.num_encoded_rows
        return self.geometry.num_tokens * self.options.temporal_pooling * self.options.spatial_pooling**2


class PlacedMedia(msgspec.Struct, frozen=True):
    """One item in a prompt. Its embedding rows fill its placeholder ranges in order. Between two ranges there
    may be text, or ranges of another item (a clip and its sound track)."""

    modality: Modality
    media_hash: str
    ranges: tuple[tuple[int, int], ...]  # (offset, length) in the prompt's token ids; ascending, none empty
    geometry: MediaGeometry

    @property
    def offset(self) -> int:
        """Index of the first placeholder token."""
        return self.ranges[0][0]

    @property
    def end(self) -> int:
        """Index after the last placeholder token."""
        return sum(self.ranges[-1])

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(token, row, count) of each run of its rows that lies in the tokens [start, end)."""
        row = 0
        for offset, length in self.ranges:
            low, high = max(start, offset), min(end, offset + length)
            if low < high:
                yield low, row + low - offset, high - low
            row += length

    def first_range_after(self, token: int) -> int | None:
        """Start of its first range that is not wholly before `token`; None: all ranges are before it."""
        return next((offset for offset, length in self.ranges if offset + length > token), None)
