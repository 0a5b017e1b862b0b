"""What opening a file once shows about it (the survey), and what follows for one client's options (the
probe).

A survey needs the file and FFmpeg or Pillow (`decode.survey`). A probe is arithmetic on a survey. A file is
therefore opened once for any number of options, and survey and probe may be made in different processes
(`surveyors`).
"""

from __future__ import annotations

import math

import msgspec

from cluster.errors import MediaError
from cluster.media import sampling
from cluster.media.settings import MediaSettings
from cluster.types.media import FrameStrategy, MediaOptions, MediaProbe, Modality


class MediaSurvey(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one image, clip or sound."""

    width: int = 0  # pixels, as shown; 0 for audio
    height: int = 0
    num_samples: int = 0  # of a sound, at the model's sampling rate
    num_frames: int = 0  # of a clip, all of them
    source_fps: float = 0.0
    key_idx: tuple[int, ...] = ()  # frames that are stored whole
    # first frames after cuts, strongest cut first; only looked for with the strategy "scenes"
    cut_idx: tuple[int, ...] = ()


def check_survey(survey: MediaSurvey, modality: Modality, settings: MediaSettings) -> None:
    """Raises ValueError for one that no accepted file has: the process that made it is not trusted."""
    limits, num_frames = settings.limits, survey.num_frames
    match modality:
        case Modality.AUDIO:
            is_possible = 0 < survey.num_samples <= settings.audio_cap()
        case Modality.IMAGE:
            is_possible = 0 < survey.width * survey.height <= limits.max_pixels
        case Modality.VIDEO:
            is_possible = 0 < survey.width * survey.height <= limits.max_pixels
            is_possible &= 0 < num_frames <= limits.max_packets + 1 and 0 < survey.source_fps < math.inf
            is_possible &= all(0 <= idx <= num_frames for idx in (*survey.key_idx, *survey.cut_idx))
            is_possible = is_possible and num_frames / survey.source_fps <= limits.max_video_s
    if not is_possible or survey.width < 0:
        raise ValueError(f"not a survey of an accepted {modality}")


def probe_of(
    modality: Modality, survey: MediaSurvey, settings: MediaSettings, options: MediaOptions
) -> MediaProbe:
    """Raises MediaError for options that the item cannot meet."""
    match modality:
        case Modality.IMAGE:
            return MediaProbe(modality, survey.width, survey.height)
        case Modality.AUDIO:
            return MediaProbe(modality, num_samples=survey.num_samples)
    indices = taken_frames(survey, settings, options)
    return MediaProbe(
        modality,
        survey.width,
        survey.height,
        num_frames=len(indices),
        fps=len(indices) / survey.num_frames * survey.source_fps,
        frame_idx=tuple(indices),
        source_fps=survey.source_fps,
        num_source_frames=survey.num_frames,
    )


def taken_frames(survey: MediaSurvey, settings: MediaSettings, options: MediaOptions) -> list[int]:
    """Indices among all frames of a clip, in display order. Raises MediaError."""
    wanted = sampling.video_sampling(settings.video, options)
    if options.strategy is FrameStrategy.KEYFRAMES:
        if not survey.key_idx:
            raise MediaError("has no key frames")
        indices = sampling.keyframes(survey.key_idx, wanted)
    else:
        indices = sampling.uniform(survey.num_frames, survey.source_fps, wanted)
        if options.strategy is FrameStrategy.SCENES:
            indices = sampling.scenes(survey.num_frames, indices, survey.cut_idx)
    most, (width, height) = settings.limits.max_video_pixels, (survey.width, survey.height)
    if len(indices) * width * height > most:
        raise MediaError(f"{len(indices)} frames of {width}x{height}, together more than {most} pixels")
    return indices
