"""What one image, clip or sound is to the rest of the system. No pixels, no tensors, no I/O."""

from __future__ import annotations

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


class MediaItem(msgspec.Struct, frozen=True):
    """One item as it came in: the bytes, what they are, and the name they go by in every cache."""

    modality: Modality
    data: bytes  # the original file's bytes, already checked against the size cap
    media_hash: str  # content hash of bytes, processor settings, options and tenant
    geometry: MediaGeometry
    options: MediaOptions = MediaOptions()
    is_returning: bool = False  # an earlier turn of the conversation showed it


class MediaSpan(msgspec.Struct, frozen=True):
    """Placeholder range [offset, offset + geometry.num_tokens) of one item in the prompt's token ids."""

    modality: Modality
    media_hash: str
    offset: int
    geometry: MediaGeometry

    @property
    def end(self) -> int:
        return self.offset + self.geometry.num_tokens
