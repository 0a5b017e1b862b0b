"""Which frames of real files are taken, and that the door's probe and the encoder's decode never differ."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.trusted_media import decode, probe
from cluster.errors import MediaError
from cluster.media.settings import DEFAULT_OPTIONS, MediaLimits, MediaSettings, VideoSampling
from cluster.media.torchvision_compat import ensure_torchvision
from cluster.types.media import FrameStrategy, MediaOptions, MediaProbe, Modality
from tests.unit.media import files

SETTINGS = MediaSettings(video=VideoSampling(fps=4, max_frames=32))
KEYFRAMES = MediaOptions(strategy=FrameStrategy.KEYFRAMES)
SCENES = MediaOptions(strategy=FrameStrategy.SCENES)
FORMATS = (
    ("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libvpx"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("avi", "mjpeg"),
    ("mpegts", "mpeg2video"), ("flv", "flv"),
)  # fmt: skip


def decoded_as_probed(data: bytes, options: MediaOptions = DEFAULT_OPTIONS) -> tuple[np.ndarray, MediaProbe]:
    """The frames, and what the probe says of them; checked to agree in all that can be compared."""
    probed = probe(Modality.VIDEO, data, SETTINGS, options)
    frames = decode(Modality.VIDEO, data, SETTINGS, options)
    assert frames.shape == (probed.num_frames, probed.height, probed.width, 3)
    assert frames.dtype == np.uint8 and frames.flags.c_contiguous
    assert len(probed.frame_idx) == probed.num_frames and probed.num_source_frames > max(probed.frame_idx)
    assert probed.fps == pytest.approx(
        probed.num_frames / probed.num_source_frames * probed.source_fps, rel=1e-9
    )
    return frames, probed


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_probe_and_decode_agree_about_every_clip_and_strategy(data):
    form, codec = data.draw(st.sampled_from(FORMATS))
    fps = data.draw(st.sampled_from((5, 24, 25, 30)))
    frames = files.scenes(*data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=3)))
    num_frames = len(frames)
    clip = files.video_of(frames, fps, form, codec, gop_size=data.draw(st.integers(1, 12)))
    max_frames = data.draw(st.none() | st.integers(1, 40))
    strategy = data.draw(st.sampled_from(FrameStrategy))
    rate = None if strategy is FrameStrategy.KEYFRAMES else data.draw(st.none() | st.floats(0.1, 60))
    frames, probed = decoded_as_probed(clip, MediaOptions(strategy=strategy, fps=rate, max_frames=max_frames))
    assert len(frames) <= (max_frames or 32)
    assert probed.num_source_frames == num_frames


@pytest.mark.parametrize(("form", "codec"), FORMATS)
@pytest.mark.parametrize(("num_frames", "fps"), [(1, 25), (3, 25), (25, 25), (101, 25)])
def test_a_video_decodes_to_as_many_frames_as_it_was_probed_at(form, codec, num_frames, fps):
    frames, probed = decoded_as_probed(files.video(num_frames, fps, form=form, codec=codec))
    assert frames.shape[1:] == (48, 64, 3)
    assert num_frames < 25 or probed.fps == pytest.approx(4, rel=0.1)


def test_a_video_is_turned_upright():
    frames, _ = decoded_as_probed(files.sideways_video())
    assert frames.shape == (4, 64, 48, 3)
    assert frames[:, :28].mean() < 10 and frames[:, 36:].mean() > 245


def test_the_frames_taken_are_those_of_uniform_sampling():
    frames, probed = decoded_as_probed(files.video(20, 10))
    assert probed.frame_idx == (0, 2, 5, 7, 10, 12, 15, 17)
    greys = frames.mean(axis=(1, 2, 3)).round()
    assert np.abs(greys - [10 * idx for idx in probed.frame_idx]).max() <= 3


def test_a_client_can_ask_for_more_or_fewer_frames():
    clip = files.video(20, 10)
    assert len(decoded_as_probed(clip, MediaOptions(fps=10))[0]) == 20
    assert len(decoded_as_probed(clip, MediaOptions(fps=1, min_frames=6))[0]) == 6
    assert decoded_as_probed(clip, MediaOptions(max_frames=2))[1].frame_idx == (0, 10)
    assert decoded_as_probed(clip, MediaOptions(max_frames=1))[1].frame_idx == (0,)
    with pytest.raises(MediaError, match=r"item 2 \(video\): fps is 0"):
        probe(Modality.VIDEO, clip, SETTINGS, MediaOptions(fps=0), item_idx=2)


def test_keyframes_are_those_that_the_file_stores_whole():
    clip = files.video_of(files.scenes(20), 10, gop_size=4)
    frames, probed = decoded_as_probed(clip, KEYFRAMES)
    assert probed.frame_idx == (0, 4, 8, 12, 16, 16)  # the last one fills the temporal patch
    left_ends = [int((frame[15, :, 0] > 130).argmax()) for frame in frames]
    assert np.abs(np.array(left_ends) - probed.frame_idx).max() <= 1
    thinned = MediaOptions(strategy=FrameStrategy.KEYFRAMES, max_frames=3)
    assert decoded_as_probed(clip, thinned)[1].frame_idx == (0, 8)


@pytest.mark.parametrize(("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mjpeg")])
def test_scenes_begin_with_the_first_frame_after_each_cut(form, codec):
    clip = files.video_of(files.scenes(7, 12, 11), 10, form, codec)
    (_, uniform), (frames, scenes) = decoded_as_probed(clip), decoded_as_probed(clip, SCENES)
    assert {0, 7, 19} <= set(scenes.frame_idx) and not {7, 19} <= set(uniform.frame_idx)
    assert len(scenes.frame_idx) == len(uniform.frame_idx)
    grounds = frames[:, -1, -1, 0].astype(int)
    assert np.abs(grounds - [20 + 60 * ((idx >= 7) + (idx >= 19)) for idx in scenes.frame_idx]).max() <= 8


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize("options", [MediaOptions(), SCENES], ids=["uniform", "scenes"])
def test_an_animated_image_is_a_video_of_its_frames_at_their_mean_rate(form, options):
    durations = [100, 200, 300, 400]
    frames, probed = decoded_as_probed(files.animation(4, form, durations), options)
    assert probed.source_fps == pytest.approx(4)
    assert np.abs(frames.mean(axis=(1, 2))[:, 0] - [0, 40, 80, 120]).max() <= 2


@pytest.mark.parametrize("form", ["WEBP", "AVIF"])
def test_a_still_image_of_these_formats_is_a_video_of_one_frame(form):
    assert decoded_as_probed(files.image(20, 10, form))[1].frame_idx == (0,)


@pytest.mark.parametrize("strategy", [FrameStrategy.UNIFORM, FrameStrategy.KEYFRAMES, FrameStrategy.SCENES])
@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx"), ("gif", "gif")]
)
def test_frames_equal_those_that_transformers_reads_with_pyav(form, codec, strategy):
    ensure_torchvision()
    from transformers.video_utils import read_video_pyav

    data = (
        files.animation(5)
        if form == "gif"
        else files.video_of(files.scenes(9, 11), 10, form, codec, gop_size=6)
    )
    frames, probed = decoded_as_probed(data, MediaOptions(strategy=strategy))
    with av.open(io.BytesIO(data), "r") as container:
        num_frames = sum(1 for _ in container.decode(video=0))
    assert probed.num_source_frames == num_frames
    file: Any = io.BytesIO(data)  # typed as a path only
    theirs, _ = read_video_pyav(file, lambda metadata: list(probed.frame_idx))
    _, rows = np.unique(probed.frame_idx, return_index=True)  # theirs has no repeated frames
    np.testing.assert_array_equal(frames[rows], theirs)


def test_the_frames_of_a_cover_are_not_the_video():
    with pytest.raises(MediaError, match="has no video stream"):
        probe(Modality.VIDEO, files.audio(0.2, form="mp4"), SETTINGS)


def test_a_decoder_off_the_list_is_never_run():
    clip = files.video(3, 10, form="matroska", codec="ffv1")
    with pytest.raises(MediaError, match=r"codec of its video stream is not accepted \(ffv1\)"):
        probe(Modality.VIDEO, clip, SETTINGS)


@pytest.mark.parametrize("options", [MediaOptions(), SCENES], ids=["uniform", "scenes"])
def test_packets_are_limited(options):
    clip = files.video(20, 10)
    with pytest.raises(MediaError, match=r"declares more samples|more than 19 packets"):
        probe(Modality.VIDEO, clip, MediaSettings(MediaLimits(max_packets=19)), options)
    with pytest.raises(MediaError, match="more than 3 frames"):
        probe(Modality.VIDEO, files.animation(5, "WEBP"), MediaSettings(MediaLimits(max_packets=3)))
