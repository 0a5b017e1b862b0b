"""Bytes to arrays: one RGB image, sampled RGB frames, or one mono waveform. And size and length of an item,
checked against the limits, before the item goes anywhere:

* Image: the header is enough.
* Video: packets and the first frame are enough; the strategy "scenes" decodes all frames.
* Audio: it is decoded, because no header gives an exact sample count.

Doors and encoders have it done in processes of their own (`surveyors`, `decoders`). The same functions
determine size and length for both, so that the two agree about every file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cluster.errors import MediaError
from cluster.media.container import DecodeBudget
from cluster.media.images import decode_image, open_image
from cluster.media.settings import MediaSettings
from cluster.media.sounds import sound_pieces
from cluster.media.survey import MediaSurvey
from cluster.media.videos import survey_clip, video_frames
from cluster.types.media import MediaOptions, Modality


def decoded_parts(
    modality: Modality, data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> Iterator[np.ndarray]:
    """The image; or each frame; or consecutive pieces of the waveform. Raises MediaError, and whatever Pillow
    or PyAV raise for broken files."""
    match modality:
        case Modality.IMAGE:
            yield decode_image(data, budget)
        case Modality.VIDEO:
            yield from video_frames(data, settings, options, budget)
        case Modality.AUDIO:
            yield from sound_pieces(data, settings, budget)


def survey(
    modality: Modality, data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> MediaSurvey:
    """Raises MediaError, and whatever Pillow or PyAV raise for broken files."""
    if not data:
        raise MediaError("empty")
    if len(data) > settings.limits.max_bytes:
        raise MediaError(f"larger than {settings.limits.max_bytes} bytes")
    match modality:
        case Modality.IMAGE:
            opened = open_image(data, budget)
            return MediaSurvey(opened.width, opened.height)
        case Modality.VIDEO:
            return survey_clip(data, settings, options, budget).survey
        case Modality.AUDIO:
            return MediaSurvey(num_samples=sum(map(len, sound_pieces(data, settings, budget))))
