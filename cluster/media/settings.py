"""Limits and sampling policy for media. Frozen and made once. Its fingerprint is part of every media hash."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from cluster.errors import ClusterError, MediaError, RequestError
from cluster.types.media import MediaOptions, Modality

DEFAULT_OPTIONS = MediaOptions()

# Address space of a process that opens media, beyond its own: an image is held up to four times at four bytes
# a pixel besides what its decoder holds; a clip's decoder holds some twenty frames.
BYTES_PER_PIXEL = 32
OTHER_PROCESS_BYTES = 512 * 2**20  # stacks of a decoder's threads, free memory between blocks
MAX_SURVEY_BYTES = 16 * 2**20
TRUNCATED = "the file is truncated"


class MediaLimits(msgspec.Struct, frozen=True):
    """The operator's limits for one item."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 10**6  # of an image or of one video frame, before resizing
    max_video_pixels: int = 512 * 10**6  # of all sampled frames together; decoding needs 3 bytes per pixel
    max_video_s: float = 600.0
    max_audio_s: float = 600.0
    max_decode_s: float = 60.0  # wall time of one survey or decode: then its process is ended
    max_request_decode_s: float = 60.0  # wall time of all surveys of one request at a door
    max_packets: int = 300_000  # in the decoded stream, and in a file's index
    max_streams: int = 32  # in one container

    @property
    def max_process_bytes(self) -> int:
        """Address space that opening one item may take."""
        return OTHER_PROCESS_BYTES + 2 * self.max_bytes + BYTES_PER_PIXEL * self.max_pixels


class VideoSampling(msgspec.Struct, frozen=True):
    """About `fps` frames per second, between min_frames and max_frames, in a multiple of `multiple`."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2  # the model's temporal patch size


class MediaSettings(msgspec.Struct, frozen=True):
    """Everything that determines what `decode` makes of the bytes of an item."""

    limits: MediaLimits = MediaLimits()
    video: VideoSampling = VideoSampling()
    sampling_rate: int = 16000  # of the audio the model takes, in Hz
    # at that rate; most that the feature extractor takes without truncating; None: any number
    max_audio_samples: int | None = None

    def audio_cap(self) -> int:
        """Most samples that an item may have."""
        cap = int(self.limits.max_audio_s * self.sampling_rate)
        return cap if self.max_audio_samples is None else min(cap, self.max_audio_samples)

    @property
    def max_result_bytes(self) -> int:
        """The largest array or survey of one item, in bytes."""
        num_pixels = max(self.limits.max_pixels, self.limits.max_video_pixels)
        return max(3 * num_pixels, 4 * self.audio_cap(), MAX_SURVEY_BYTES)


def item_name(modality: Modality, item_idx: int) -> str:
    return f"item {item_idx} ({modality})"


@contextmanager
def naming(modality: Modality, item_idx: int | None, param: str | None = None) -> Iterator[None]:
    """Puts the item's name before every error, unless `item_idx` is None. Turns any exception of a decoder
    into a MediaError. `param`: the item's place in the request, if it is known here."""
    prefix = "" if item_idx is None else f"{item_name(modality, item_idx)}: "
    try:
        yield
    except MediaError as error:
        message = error.message if error.message.startswith(prefix) else prefix + error.message
        raise MediaError(message, param=error.param or param) from error
    except RequestError as error:
        error.param = error.param or param
        raise
    except ClusterError:
        raise
    except MemoryError as error:
        raise MediaError(f"{prefix}too large to decode", param=param) from error
    except Exception as error:
        raise MediaError(f"{prefix}cannot be decoded: {_defect(error)}", param=param) from error


def _defect(error: Exception) -> str:
    """What a library found wrong with a file. Its own words may contain addresses and paths."""
    words = str(error)
    if isinstance(error, EOFError) or "truncated" in words.lower():
        return TRUNCATED
    if "MAX_TEXT_CHUNK" in words or "MAX_TEXT_MEMORY" in words:
        return "its metadata take more than 1 MiB when they are unpacked"
    return "its content is damaged, or of a kind that this server does not read"
