from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import MediaError
from cluster.media import sampling
from cluster.media.settings import VideoSampling
from cluster.types.media import FrameStrategy, MediaOptions

OWN = VideoSampling(fps=2.0, min_frames=4, max_frames=32, multiple=2)
COUNTS = st.integers(1, 500)
RATES = st.floats(0.1, 240)
SAMPLINGS = st.builds(
    lambda fps, low, more, multiple: VideoSampling(fps, low, low + more, multiple),
    st.floats(0.01, 100), st.integers(1, 50), st.integers(0, 100), st.integers(1, 4),
)  # fmt: skip


def test_sampling_is_transformers_own(hf_processor):
    from transformers.video_utils import VideoMetadata

    own = VideoSampling(fps=4, max_frames=32)
    for total in range(2, 400, 7):
        for fps in (5.0, 24.0, 29.97):
            theirs = hf_processor.video_processor.sample_frames(
                VideoMetadata(total_num_frames=total, fps=fps), min_frames=4, max_frames=32, fps=4
            )
            ours = sampling.uniform(total, fps, own)
            # theirs rounds in float32: an index may differ by one, and sometimes there is one index too many
            assert len(theirs) - len(ours) in (0, 1)
            assert np.abs(np.array(ours) - theirs.numpy()[: len(ours)]).max() <= 1


@given(COUNTS, RATES, SAMPLINGS)
def test_uniform_frames_are_distinct_in_order_and_as_many_as_allowed(num_frames, source_fps, own):
    indices = sampling.uniform(num_frames, source_fps, own)
    assert indices == sorted(set(indices)) and indices[0] >= 0 and indices[-1] < num_frames
    assert 1 <= len(indices) <= own.max_frames
    assert len(indices) % own.multiple == 0 or len(indices) == min(num_frames, own.max_frames)


@given(st.lists(st.integers(0, 1000), min_size=1, unique=True).map(sorted), SAMPLINGS)
def test_keyframes_are_thinned_and_the_last_fills_a_temporal_patch(key_idx, own):
    indices = sampling.keyframes(key_idx, own)
    assert set(indices) <= set(key_idx) and indices == sorted(indices) and indices[0] == key_idx[0]
    assert len(indices) <= own.max_frames
    assert len(indices) % own.multiple == 0 or own.max_frames < own.multiple
    assert len(set(indices[: len(key_idx)])) > len(indices) - own.multiple  # only padding repeats


@given(COUNTS, RATES, SAMPLINGS, st.lists(st.integers(0, 499), unique=True))
def test_scenes_keep_the_number_of_uniform_frames_and_prefer_the_strongest_cuts(
    num_frames, source_fps, own, cut_idx
):
    uniform = sampling.uniform(num_frames, source_fps, own)
    cut_idx = [idx for idx in cut_idx if 0 < idx < num_frames]
    indices = sampling.scenes(num_frames, uniform, cut_idx)
    assert len(indices) == len(uniform) == len(set(indices)) and indices == sorted(indices)
    assert set(indices) >= {0, *cut_idx[: len(uniform) - 1]}
    assert set(indices) <= {*uniform, *cut_idx}


def test_a_clients_wishes_are_bounded_by_the_operators_ceiling():
    wishes = MediaOptions(fps=8.0, min_frames=6, max_frames=1000)
    assert sampling.video_sampling(OWN, wishes) == VideoSampling(8.0, 6, 32, 2)
    assert sampling.video_sampling(OWN, MediaOptions(max_frames=2)) == VideoSampling(2.0, 2, 2, 2)
    assert sampling.video_sampling(OWN, MediaOptions()) == OWN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MediaOptions(fps=0.0), "fps is 0; it must be above 0"),
        (MediaOptions(fps=-2.0), "fps is -2"),
        (MediaOptions(fps=float("nan")), "fps is nan"),
        (MediaOptions(fps=1e9), "at most 1000"),
        (MediaOptions(min_frames=0), "min_frames is 0; it must be at least 1"),
        (MediaOptions(max_frames=-1), "max_frames is -1"),
        (
            MediaOptions(min_frames=8, max_frames=4),
            "num_frames is 8, more than the 4 frames that may be taken",
        ),
        (MediaOptions(min_frames=33), "num_frames is 33, more than the 32 frames"),
        (MediaOptions(strategy=FrameStrategy.KEYFRAMES, fps=1.0), "neither fps nor min_frames"),
        (MediaOptions(strategy=FrameStrategy.KEYFRAMES, min_frames=4), "neither fps nor min_frames"),
    ],
)
def test_contradictory_and_absurd_wishes_are_refused(options, message):
    with pytest.raises(MediaError, match=message):
        sampling.video_sampling(OWN, options)


def _histograms(*levels: float) -> list[np.ndarray]:
    """One for each frame: the pixels share two bins, in this proportion."""
    return [
        sampling.luma_histogram(np.repeat([0, 255], [round(100 * (1 - x)), round(100 * x)])) for x in levels
    ]


def test_a_cut_is_a_change_that_stands_out():
    assert sampling.cuts(_histograms(*[0.1] * 6, *[0.9] * 6, *[0.5] * 6)) == [6, 12]  # the stronger one first
    assert sampling.cuts(_histograms(*[0.1, 0.9] * 8)) == []  # flicker
    assert sampling.cuts(_histograms(*np.linspace(0, 1, 30))) == []  # a fade
    assert (
        sampling.cuts(_histograms(*[0.3] * 9)) == sampling.cuts(_histograms(0.5)) == sampling.cuts([]) == []
    )
    assert sampling.cuts(_histograms(0.1, 0.9)) == [1]
