"""A video: which of its frames are taken (door and encoder), and their pixels (encoder).

Door and encoder both use `survey_clip` and `taken_frames`, so their answers cannot differ. A planned frame is
the last one shown at its time. The number of frames is therefore always the plan's, even if some packets show
nothing (VP8's hidden frames) or two share a time. Planning reads the packets and decodes the first frame.
Only the strategy "scenes" decodes all frames, also at the door, and twice at the encoder; the number of
frames does not depend on the cuts that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from cluster.errors import MediaError
from cluster.media import sampling
from cluster.media.clips import Clip, Picture, Timeline, open_clip
from cluster.media.container import DecodeBudget
from cluster.media.settings import MediaSettings
from cluster.media.survey import MediaSurvey, taken_frames
from cluster.types.media import FrameStrategy, MediaOptions


class SurveyedClip(msgspec.Struct, frozen=True):
    survey: MediaSurvey
    turns: int  # quarter turns, counter-clockwise, from how frames are stored to how they are shown
    times: tuple[int, ...] | None  # of all frames in the file's units; None: the file does not say


def survey_clip(
    data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> SurveyedClip:
    """Surveys a clip. With the strategy "scenes" in `options` all frames are decoded to find cuts. Raises
    MediaError."""
    sampling.video_sampling(settings.video, options)  # refuses impossible options before the file is opened
    clip = open_clip(data, budget)
    timeline = clip.timeline()
    if not timeline.num_frames / timeline.source_fps <= settings.limits.max_video_s:
        raise MediaError(f"longer than {settings.limits.max_video_s:g} seconds")
    first = next(clip.pictures(num_threads=1), None)
    if first is None:
        raise MediaError("no frame can be decoded")
    width, height = (first.height, first.width) if first.turns % 2 else (first.width, first.height)
    cuts = _cuts(clip, timeline) if options.strategy is FrameStrategy.SCENES else ()
    survey = MediaSurvey(
        width,
        height,
        num_frames=timeline.num_frames,
        source_fps=timeline.source_fps,
        key_idx=timeline.key_idx,
        cut_idx=tuple(cuts),
    )
    return SurveyedClip(survey, first.turns, timeline.times)


def video_frames(
    data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> Iterator[np.ndarray]:
    """[height, width, 3] uint8 each: the frames that are taken; the same one may come repeatedly. Raises
    MediaError."""
    clip = survey_clip(data, settings, options, budget)
    taken = taken_frames(clip.survey, settings, options)
    only_keys = options.strategy is FrameStrategy.KEYFRAMES and clip.times is not None
    shown = clip.survey.height, clip.survey.width
    height, width = reversed(shown) if clip.turns % 2 else shown
    frame = np.empty(0)
    pictures = open_clip(data, budget).pictures(only_keys=only_keys)
    for nth, picture in enumerate(_taken(pictures, taken, clip.times)):
        if nth == 0 or taken[nth] != taken[nth - 1]:
            frame = np.ascontiguousarray(np.rot90(picture.rgb(width, height), clip.turns))
        if frame.shape != (*shown, 3):
            raise MediaError("its header and its content have different sizes")
        yield frame


def _cuts(clip: Clip, timeline: Timeline) -> list[int]:
    """First frames after cuts, strongest cut first."""
    histograms, places = [], []
    for position, picture in enumerate(clip.pictures(num_threads=1)):
        histograms.append(sampling.luma_histogram(picture.luma()))
        places.append(timeline.idx_at(picture.time, position))
    return [places[cut] for cut in sampling.cuts(histograms)]


def _taken(
    pictures: Iterator[Picture], taken: Sequence[int], times: Sequence[int] | None
) -> Iterator[Picture]:
    """One picture for each frame that is taken: the last one that is not shown after it."""
    nth, last = 0, None
    for position, picture in enumerate(pictures):
        while last is not None and nth < len(taken) and _is_after(picture, position, taken[nth], times):
            yield last
            nth += 1
        if nth == len(taken):
            return
        last = picture
    if last is None:
        raise MediaError("no frame can be decoded")
    for _ in range(nth, len(taken)):
        yield last


def _is_after(picture: Picture, position: int, idx: int, times: Sequence[int] | None) -> bool:
    """Whether this picture is shown after the frame of this index. If so, the picture before it was visible
    at that time."""
    if times is None or picture.time is None:
        return position > idx
    return picture.time > times[idx]
