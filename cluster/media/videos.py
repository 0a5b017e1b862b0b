"""A video: which of its frames are taken (door and encoder), and their pixels (encoder).

Both ask `plan_video`, so their answers cannot differ. A planned frame is the last one shown at its time, so the number of
frames is the plan's even where some packets show nothing (VP8's hidden frames) or two share a time. Planning reads packets
and decodes the first frame; the strategy "scenes" alone decodes all of them, in the door, too, and in the encoder twice.
The number of frames does not depend on where it finds cuts.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from cluster.errors import MediaError
from cluster.media import sampling
from cluster.media.budget import DecodeBudget
from cluster.media.clips import Clip, Picture, Timeline, open_clip
from cluster.media.settings import MediaSettings, VideoSampling
from cluster.types.media import FrameStrategy, MediaOptions


class VideoPlan(msgspec.Struct, frozen=True):
    """Which frames to take. Equal frames may follow each other."""

    frame_idx: tuple[int, ...]  # among all frames, in the order in which they are shown
    source_fps: float
    num_source_frames: int
    width: int  # as shown
    height: int
    turns: int  # quarter turns, counter-clockwise, from how frames are stored to how they are shown
    times: tuple[int, ...] | None  # of the taken frames in the file's units; None: it says nothing
    only_keys: bool  # all are key frames, nothing else needs decoding

    @property
    def fps(self) -> float:
        """Frames per second of the frames taken."""
        return len(self.frame_idx) / self.num_source_frames * self.source_fps


def plan_video(
    data: bytes, settings: MediaSettings, options: MediaOptions, budget: DecodeBudget
) -> VideoPlan:
    """Raises MediaError."""
    wanted = sampling.video_sampling(settings.video, options)
    limits = settings.limits
    clip = open_clip(data, budget)
    timeline = clip.timeline()
    if not timeline.num_frames / timeline.source_fps <= limits.max_video_s:
        raise MediaError(f"longer than {limits.max_video_s:g} seconds")
    first = next(clip.pictures(num_threads=1), None)
    if first is None:
        raise MediaError("no frame can be decoded")
    width, height = first.width, first.height
    indices = _frame_idx(options.strategy, clip, timeline, wanted)
    if len(indices) * width * height > limits.max_video_pixels:
        raise MediaError(
            f"{len(indices)} frames of {width}x{height}, together more than {limits.max_video_pixels} pixels"
        )
    times = timeline.times
    return VideoPlan(
        tuple(indices),
        timeline.source_fps,
        timeline.num_frames,
        *((height, width) if first.turns % 2 else (width, height)),
        first.turns,
        None if times is None else tuple(times[idx] for idx in indices),
        options.strategy is FrameStrategy.KEYFRAMES and times is not None,
    )


def decode_video(data: bytes, plan: VideoPlan, budget: DecodeBudget) -> np.ndarray:
    """[number of frames, height, width, 3] uint8. Raises MediaError."""
    width, height = (plan.height, plan.width) if plan.turns % 2 else (plan.width, plan.height)
    frames = np.empty((len(plan.frame_idx), plan.height, plan.width, 3), np.uint8)
    for nth, picture in enumerate(_taken(open_clip(data, budget), plan)):
        if nth and plan.frame_idx[nth] == plan.frame_idx[nth - 1]:
            frames[nth] = frames[nth - 1]
        else:
            frames[nth] = np.rot90(picture.rgb(width, height), plan.turns)
    return frames


def _frame_idx(strategy: FrameStrategy, clip: Clip, timeline: Timeline, wanted: VideoSampling) -> list[int]:
    if strategy is FrameStrategy.KEYFRAMES:
        if not timeline.key_idx:
            raise MediaError("has no key frames")
        return sampling.keyframes(timeline.key_idx, wanted)
    indices = sampling.uniform(timeline.num_frames, timeline.source_fps, wanted)
    if strategy is FrameStrategy.UNIFORM:
        return indices
    histograms, places = [], []
    for position, picture in enumerate(clip.pictures(num_threads=1)):
        histograms.append(sampling.luma_histogram(picture.luma()))
        places.append(timeline.idx_at(picture.time, position))
    return sampling.scenes(timeline.num_frames, indices, [places[cut] for cut in sampling.cuts(histograms)])


def _taken(clip: Clip, plan: VideoPlan) -> Iterator[Picture]:
    """One picture for each planned frame: the last of the clip that is not shown after it."""
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
    """Whether this picture is shown after the plan's nth frame, so that the one before it was on screen then."""
    if plan.times is None or picture.time is None:
        return position > plan.frame_idx[nth]
    return picture.time > plan.times[nth]
