"""Size and length of an item, checked against the limits, before the item goes anywhere. Blocks; a door runs
it in processes of its own (`surveyors`).

* Image: the header is enough.
* Video: packets and the first frame are enough; the strategy "scenes" decodes all frames.
* Audio: it is decoded, because no header gives an exact sample count.
"""

from __future__ import annotations

from cluster.errors import MediaError
from cluster.media.budget import DecodeBudget
from cluster.media.images import open_image
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings, naming
from cluster.media.sounds import sound_pieces
from cluster.media.survey import MediaSurvey, probe_of
from cluster.media.videos import survey_clip
from cluster.types.media import MediaOptions, MediaProbe, Modality


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


def probe(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> MediaProbe:
    """Raises MediaError, whose message names the item unless `item_idx` is None."""
    with naming(modality, item_idx):
        found = survey(modality, data, settings, options, DecodeBudget(settings.limits))
        return probe_of(modality, found, settings, options)
