"""Bytes to arrays: one RGB image, sampled RGB frames, one mono waveform. The encoder's half of `probe`.

Size and length are decided by functions that `probe` calls, too, so the two agree about every file.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cluster.media.budget import DecodeBudget
from cluster.media.images import decode_image
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings, naming
from cluster.media.sounds import decode_audio
from cluster.media.videos import decode_video, plan_video
from cluster.types.media import MediaOptions, Modality


class DecodedMedia(msgspec.Struct, frozen=True):
    """Image: [H, W, 3] uint8. Video: [T, H, W, 3] uint8. Audio: [num_samples] float32. The rest is of a video alone."""

    modality: Modality
    array: np.ndarray
    fps: float = 0.0  # frames per second of these frames
    frame_idx: tuple[int, ...] = ()  # of these frames, among all of the clip
    source_fps: float = 0.0  # frames per second of the clip
    num_source_frames: int = 0
    shown_at_s: tuple[float, ...] = ()  # seconds from the clip's first frame to each of these


def decode(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> DecodedMedia:
    """Blocks for as long as decoding takes, `max_decode_s` at most. Raises MediaError."""
    with naming(modality, item_idx):
        budget = DecodeBudget(settings.limits)
        match modality:
            case Modality.IMAGE:
                return DecodedMedia(modality, decode_image(data, budget))
            case Modality.VIDEO:
                plan = plan_video(data, settings, options, budget)
                return DecodedMedia(
                    modality,
                    decode_video(data, plan, budget),
                    plan.fps,
                    plan.frame_idx,
                    plan.source_fps,
                    plan.num_source_frames,
                    plan.shown_at_s,
                )
            case Modality.AUDIO:
                return DecodedMedia(modality, decode_audio(data, settings, budget))
