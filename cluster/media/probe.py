"""What an item is, before it goes anywhere: size and length, within the limits. Runs in the door, blocks.

Images are known from their header. Videos are planned from their packets and first frame. Audio is decoded, because no
header gives an exact sample count (see `decode`)."""

from __future__ import annotations

from cluster.errors import MediaError
from cluster.media.decode import decode_audio, open_image, plan_video
from cluster.media.settings import MediaSettings, naming
from cluster.types.media import MediaProbe, Modality


def probe(modality: Modality, data: bytes, settings: MediaSettings, *, item_idx: int = 0) -> MediaProbe:
    """Raises MediaError, whose message names the item."""
    with naming(modality, item_idx):
        if not data:
            raise MediaError("empty")
        if len(data) > settings.limits.max_bytes:
            raise MediaError(f"larger than {settings.limits.max_bytes} bytes")
        match modality:
            case Modality.IMAGE:
                _, width, height = open_image(data, settings)
                return MediaProbe(modality, width=width, height=height)
            case Modality.VIDEO:
                plan = plan_video(data, settings)
                num_frames = len(plan.frame_idx)
                return MediaProbe(modality, plan.width, plan.height, num_frames=num_frames, fps=plan.fps)
            case Modality.AUDIO:
                return MediaProbe(modality, num_samples=len(decode_audio(data, settings)))
