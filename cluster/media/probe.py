"""What an item is, before it goes anywhere: size and length, within the limits. Runs in the door, blocks.

Images are known from their header. Videos are planned from their packets and first frame; the strategy "scenes" decodes all
frames. Audio is decoded, because no header gives an exact sample count."""

from __future__ import annotations

from cluster.errors import MediaError
from cluster.media.budget import DecodeBudget
from cluster.media.images import open_image
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings, naming
from cluster.media.sounds import count_samples
from cluster.media.videos import plan_video
from cluster.types.media import MediaOptions, MediaProbe, Modality


def probe(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> MediaProbe:
    """Raises MediaError, whose message names the item, unless it is None."""
    with naming(modality, item_idx):
        if not data:
            raise MediaError("empty")
        if len(data) > settings.limits.max_bytes:
            raise MediaError(f"larger than {settings.limits.max_bytes} bytes")
        budget = DecodeBudget(settings.limits)
        match modality:
            case Modality.IMAGE:
                opened = open_image(data, budget)
                return MediaProbe(modality, opened.width, opened.height)
            case Modality.VIDEO:
                plan = plan_video(data, settings, options, budget)
                return MediaProbe(
                    modality,
                    plan.width,
                    plan.height,
                    num_frames=len(plan.frame_idx),
                    fps=plan.fps,
                    frame_idx=plan.frame_idx,
                    source_fps=plan.source_fps,
                    num_source_frames=plan.num_source_frames,
                )
            case Modality.AUDIO:
                return MediaProbe(modality, num_samples=count_samples(data, settings, budget))
