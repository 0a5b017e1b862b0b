"""Which frames of a video are taken. Pure: indices from numbers, without media.

Every strategy gives sorted indices among the clip's frames in display order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.errors import MediaError
from cluster.media.settings import VideoSampling
from cluster.types.media import FrameStrategy, MediaOptions

MAX_FPS = 1000.0  # faster than any camera whose files reach this server
NUM_LUMA_BINS = 32
CUT_SHARE = 0.25  # share of the pixels that must change their bin between two frames for a cut
# The change must also be so many times that between neighbouring frames, because flicker and fast motion are
# not cuts.
CUT_RATIO = 3.0
CUT_NEIGHBOURS = 8  # frames on each side


def video_sampling(default: VideoSampling, options: MediaOptions) -> VideoSampling:
    """The model's sampling with the client's wishes; `default.max_frames` stays the ceiling. Raises
    MediaError."""
    _check(default, options)
    max_frames = min(options.max_frames or default.max_frames, default.max_frames)
    min_frames = min(default.min_frames, max_frames) if options.min_frames is None else options.min_frames
    return VideoSampling(options.fps or default.fps, min_frames, max_frames, default.multiple)


def _check(default: VideoSampling, options: MediaOptions) -> None:
    if options.fps is not None and not 0 < options.fps <= MAX_FPS:
        raise MediaError(f"fps is {options.fps:g}; it must be above 0 and at most {MAX_FPS:g}")
    for name in ("min_frames", "max_frames"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise MediaError(f"{name} is {value}; it must be at least 1")
    ceiling = min(options.max_frames or default.max_frames, default.max_frames)
    if options.min_frames is not None and options.min_frames > ceiling:
        raise MediaError(
            f"min_frames or num_frames is {options.min_frames}, more than the {ceiling} frames that may be "
            "taken"
        )
    if options.strategy is FrameStrategy.KEYFRAMES and not options.fps is options.min_frames is None:
        raise MediaError("the strategy 'keyframes' takes max_frames, but neither fps nor min_frames")


def uniform(num_frames: int, source_fps: float, sampling: VideoSampling) -> list[int]:
    """The frames that transformers' `sample_frames` takes. If that would take no frame: the available frames
    of one temporal patch."""
    wanted = min(
        max(num_frames / source_fps * sampling.fps, sampling.min_frames), sampling.max_frames, num_frames
    )
    least = min(num_frames, sampling.multiple, sampling.max_frames)
    wanted = max(int(wanted // sampling.multiple) * sampling.multiple, least)
    return [idx * num_frames // wanted for idx in range(wanted)]


def thinned(indices: Sequence[int], max_count: int) -> list[int]:
    """At most `max_count` of the indices, at equal distances, always with the first."""
    count = min(len(indices), max_count)
    return [indices[idx * len(indices) // count] for idx in range(count)]


def keyframes(key_idx: Sequence[int], sampling: VideoSampling) -> list[int]:
    """Thinned to max_frames. If max_frames allows it, the last is repeated until a temporal patch is full."""
    taken = thinned(key_idx, max(sampling.max_frames // sampling.multiple * sampling.multiple, 1))
    padding = -len(taken) % sampling.multiple
    return taken + taken[-1:] * min(padding, sampling.max_frames - len(taken))


def scenes(num_frames: int, uniform_idx: Sequence[int], cut_idx: Sequence[int]) -> list[int]:
    """As many frames as `uniform_idx` has: the first, the first after each cut (strongest cuts first), then
    uniform ones."""
    count = len(uniform_idx)
    chosen = set([0, *(idx for idx in cut_idx if 0 < idx < num_frames)][:count])
    rest = [idx for idx in uniform_idx if idx not in chosen]
    return sorted(chosen.union(thinned(rest, count - len(chosen)) if count > len(chosen) else ()))


def luma_histogram(luma: np.ndarray) -> np.ndarray:
    """[height, width] uint8 to [NUM_LUMA_BINS] int64: pixels of each bin in millionths of all pixels."""
    counts = np.bincount(luma.reshape(-1) >> 3, minlength=NUM_LUMA_BINS)
    return counts * 1_000_000 // luma.size


def cuts(histograms: Sequence[np.ndarray]) -> list[int]:
    """Positions of the histograms that follow a cut, strongest cut first. Integer arithmetic gives the same
    on every machine."""
    if len(histograms) < 2:
        return []
    changes = np.abs(np.diff(np.stack(histograms), axis=0)).sum(axis=1) // 2
    found = []
    for position, change in enumerate(changes.tolist()):
        around = np.delete(
            changes[max(position - CUT_NEIGHBOURS, 0) : position + CUT_NEIGHBOURS + 1],
            min(position, CUT_NEIGHBOURS),
        )
        usual = int(np.sort(around)[len(around) // 2]) if len(around) else 0
        if change >= max(CUT_SHARE * 1_000_000, CUT_RATIO * usual):
            found.append((-change, position + 1))
    return [position for _, position in sorted(found)]
