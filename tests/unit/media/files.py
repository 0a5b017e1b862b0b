"""Small media files, made on the spot."""

from bench.media_files import (
    AUDIO_CODECS,
    animation,
    audio,
    image,
    raw_wav,
    rotated_jpeg,
    scenes,
    sideways_video,
    sine,
    video,
    video_of,
)

__all__ = [
    "AUDIO_CODECS", "animation", "audio", "image", "raw_wav", "rotated_jpeg", "scenes", "sideways_video", "sine", "video", "video_of",
]  # fmt: skip
