"""Bytes to arrays: one RGB image, sampled RGB frames, or one mono waveform. Runs at the encoder, as `probe`
does at the door.

The same functions determine size and length for `probe` and `decode`, so the two agree about every file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cluster.media.budget import DecodeBudget
from cluster.media.images import decode_image
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings, naming
from cluster.media.sounds import decode_audio
from cluster.media.videos import decode_video, plan_video
from cluster.types.media import MediaOptions, Modality


def decode(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
    is_wanted: Callable[[], bool] = lambda: True,
) -> np.ndarray:
    """Image: [H, W, 3] uint8. Video: [T, H, W, 3] uint8, the frames that `probe` names. Audio: [num_samples]
    float32.

    Blocks while it decodes, for at most `max_decode_s` and no longer than it `is_wanted`. Raises MediaError
    and NotWantedError."""
    with naming(modality, item_idx):
        budget = DecodeBudget(settings.limits, is_wanted=is_wanted)
        return decode_within(modality, data, settings, options, budget)


def decode_within(
    modality: Modality, data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> np.ndarray:
    """Raises MediaError, and whatever Pillow or PyAV raise for broken files."""
    match modality:
        case Modality.IMAGE:
            return decode_image(data, budget)
        case Modality.VIDEO:
            return decode_video(data, plan_video(data, settings, options, budget), budget)
        case Modality.AUDIO:
            return decode_audio(data, settings, budget)
