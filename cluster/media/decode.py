"""Bytes to arrays: one RGB image, sampled RGB frames, or one mono waveform.

Encoders have it done in processes of their own (`decoders`), part by part (`decoded_parts`). `decode` does
the same in the caller's process, for files that are trusted.

The same functions determine size and length for `probe` and `decode`, so the two agree about every file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cluster.media.budget import DecodeBudget
from cluster.media.images import decode_image
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings, naming
from cluster.media.sounds import sound_pieces
from cluster.media.videos import plan_video, video_frames
from cluster.types.media import MediaOptions, Modality


def decode(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> np.ndarray:
    """Image: [H, W, 3] uint8. Video: [T, H, W, 3] uint8, the frames that `probe` names. Audio: [num_samples]
    float32.

    Blocks while it decodes, for at most `max_decode_s`. Raises MediaError."""
    with naming(modality, item_idx):
        parts = list(decoded_parts(modality, data, settings, options, DecodeBudget(settings.limits)))
        match modality:
            case Modality.IMAGE:
                return parts[0]
            case Modality.VIDEO:
                return np.stack(parts)
            case Modality.AUDIO:
                return np.concatenate(parts)


def decoded_parts(
    modality: Modality, data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> Iterator[np.ndarray]:
    """The image; or each frame; or consecutive pieces of the waveform. Raises MediaError, and whatever Pillow
    or PyAV raise for broken files."""
    match modality:
        case Modality.IMAGE:
            yield decode_image(data, budget)
        case Modality.VIDEO:
            yield from video_frames(data, plan_video(data, settings, options, budget), budget)
        case Modality.AUDIO:
            yield from sound_pieces(data, settings, budget)
