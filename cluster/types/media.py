"""What one image, clip or sound is to the rest of the system. No pixels, no tensors, no I/O."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class MediaProbe(msgspec.Struct, frozen=True):
    """What a header says, before anything is decoded."""

    modality: Modality
    width: int = 0  # pixels, after EXIF orientation; 0 for audio
    height: int = 0
    num_frames: int = 0  # frames that will be sampled from a video (its `fps` belongs to these frames)
    fps: float = 0.0  # frames per second of the sampled frames
    num_samples: int = 0  # audio samples at the model's sampling rate


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
    media_hash: str  # content hash of bytes and processor settings
    geometry: MediaGeometry


class MediaSpan(msgspec.Struct, frozen=True):
    """Placeholder range [offset, offset + geometry.num_tokens) of one item in the prompt's token ids."""

    modality: Modality
    media_hash: str
    offset: int
    geometry: MediaGeometry

    @property
    def end(self) -> int:
        return self.offset + self.geometry.num_tokens
