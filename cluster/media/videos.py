"""A video: which of its frames are taken (door and encoder), and their pixels (encoder).

Door and encoder both use `survey_clip` and `taken_frames`, so their answers cannot differ. A planned frame is
the last one shown at its time. The number of frames is therefore always the plan's, even if some packets show
nothing (VP8's hidden frames) or two share a time. Planning reads the packets and decodes the first frame.
Only the strategy "scenes" decodes all frames, also at the door, and twice at the encoder; the number of
frames does not depend on the cuts that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from cluster.errors import MediaError
from cluster.media import sampling
from cluster.media.clips import Clip, Picture, Timeline, open_clip
from cluster.media.container import DecodeBudget
from cluster.media.settings import MediaSettings
from cluster.media.survey import MediaSurvey, taken_frames
from cluster.types.media import FrameStrategy, MediaOptions


class VideoPlan(msgspec.Struct, frozen=True):
    """Which frames to take. The same frame may occur repeatedly."""

    frame_idx: tuple[int, ...]  # among all frames, in display order
    width: int  # as shown
    height: int
    turns: int  # quarter turns, counter-clockwise, from how frames are stored to how they are shown
    times: tuple[int, ...] | None  # of the taken frames in the file's units; None: the file does not say
    only_keys: bool  # all are key frames, and only these are decoded


class SurveyedClip(msgspec.Struct, frozen=True):
    survey: MediaSurvey
    turns: int  # as in VideoPlan
    times: tuple[int, ...] | None  # of all frames


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


def plan_video(
    data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> VideoPlan:
    """Raises MediaError."""
    clip = survey_clip(data, settings, options, budget)
    indices = taken_frames(clip.survey, settings, options)
    return VideoPlan(
        tuple(indices),
        clip.survey.width,
        clip.survey.height,
        clip.turns,
        None if clip.times is None else tuple(clip.times[idx] for idx in indices),
        options.strategy is FrameStrategy.KEYFRAMES and clip.times is not None,
    )


def video_frames(data: bytes, plan: VideoPlan, budget: DecodeBudget) -> Iterator[np.ndarray]:
    """[height, width, 3] uint8 each: the frames of the plan. Raises MediaError."""
    width, height = (plan.height, plan.width) if plan.turns % 2 else (plan.width, plan.height)
    frame = np.empty(0)
    for nth, picture in enumerate(_taken(open_clip(data, budget), plan)):
        if nth == 0 or plan.frame_idx[nth] != plan.frame_idx[nth - 1]:
            frame = np.ascontiguousarray(np.rot90(picture.rgb(width, height), plan.turns))
        if frame.shape != (plan.height, plan.width, 3):
            raise MediaError("its header and its content have different sizes")
        yield frame


def _cuts(clip: Clip, timeline: Timeline) -> list[int]:
    """First frames after cuts, strongest cut first."""
    histograms, places = [], []
    for position, picture in enumerate(clip.pictures(num_threads=1)):
        histograms.append(sampling.luma_histogram(picture.luma()))
        places.append(timeline.idx_at(picture.time, position))
    return [places[cut] for cut in sampling.cuts(histograms)]


def _taken(clip: Clip, plan: VideoPlan) -> Iterator[Picture]:
    """One picture for each planned frame: the last picture of the clip that is not shown after it."""
    nth, last = 0, None
    for position, picture in enumerate(clip.pictures(only_keys=plan.only_keys)):
        while last is not None and nth < len(plan.frame_idx) and _is_after(picture, position, plan, nth):
            yield last
            nth += 1
        if nth == len(plan.frame_idx):
            return
        last = picture
    if last is None:
        raise MediaError("no frame can be decoded")
    for _ in range(nth, len(plan.frame_idx)):
        yield last


def _is_after(picture: Picture, position: int, plan: VideoPlan, nth: int) -> bool:
    """Whether this picture is shown after the plan's nth frame. If so, the picture before it was visible at
    that time."""
    if plan.times is None or picture.time is None:
        return position > plan.frame_idx[nth]
    return picture.time > plan.times[nth]
