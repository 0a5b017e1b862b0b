"""Frames go first, then pixels, from all items alike and no more than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.types.media import MediaProbe, Modality
from router.prompts.media_budget import MIN_FRAMES, MIN_PIXELS_SHARE, Reduction, fit, load_share


def image(width: int, height: int) -> MediaProbe:
    return MediaProbe(Modality.IMAGE, width, height)


def video(num_frames: int, width: int, height: int) -> MediaProbe:
    return MediaProbe(Modality.VIDEO, width, height, num_frames)


SOUND = MediaProbe(Modality.AUDIO, num_samples=16_000)


def rows(probes):
    """A row for each 100 pixels of a frame, at least one; 25 for a sound."""

    def measure(idx: int, reduction: Reduction) -> int:
        probe = probes[idx]
        if probe.modality is Modality.AUDIO:
            return 25
        pixels = min(probe.width * probe.height, reduction.max_pixels or 10**9)
        frames = min(probe.num_frames or 1, reduction.max_frames or 10**9)
        return frames * max(1, pixels // 100)

    return measure


def total(probes, reductions) -> int:
    measure = rows(probes)
    return sum(measure(idx, reduction) for idx, reduction in enumerate(reductions))


def test_what_fits_is_left_alone():
    probes = [image(100, 100), SOUND]
    assert fit(probes, 125, rows(probes)) == [Reduction(), Reduction()]


def test_clips_lose_frames_before_anything_loses_pixels():
    probes = [video(32, 100, 100), image(100, 100)]
    reductions = fit(probes, 100 + 1600, rows(probes))
    assert reductions is not None and reductions[0].max_pixels is None and reductions[1] == Reduction()
    assert reductions[0].max_frames in (15, 16)


def test_pixels_go_when_frames_are_not_enough():
    probes = [video(32, 100, 100), image(200, 100)]
    reductions = fit(probes, 300, rows(probes))
    assert reductions is not None and reductions[0].max_frames == MIN_FRAMES
    share = [reductions[0].max_pixels / 10_000, reductions[1].max_pixels / 20_000]
    assert share[0] == pytest.approx(share[1], abs=0.01) and share[0] == pytest.approx(0.5, abs=0.05)
    assert 280 <= total(probes, reductions) <= 300


def test_what_cannot_fit_is_not_cut_at_all():
    probes = [image(100, 100)]
    assert fit(probes, int(100 * MIN_PIXELS_SHARE) - 1, rows(probes)) is None
    assert fit([SOUND], 24, rows([SOUND])) is None


sizes = st.integers(1, 600)
items = st.one_of(
    st.builds(image, sizes, sizes), st.builds(video, st.integers(1, 64), sizes, sizes), st.just(SOUND)
)


@given(st.lists(items, max_size=4), st.integers(1, 20_000))
def test_cuts_keep_within_the_budget_and_use_most_of_it(probes, budget):
    reductions = fit(probes, budget, rows(probes))
    if reductions is None:
        floor = [
            Reduction(MIN_FRAMES, max(1, int(p.width * p.height * MIN_PIXELS_SHARE)) if p.width else None)
            for p in probes
        ]
        assert total(probes, floor) > budget
    else:
        assert total(probes, reductions) <= budget
        whole = total(probes, [Reduction() for _ in probes])
        assert reductions == [Reduction() for _ in probes] or whole > budget


def test_media_keeps_less_the_longer_the_queue_but_a_quarter_at_least():
    assert load_share(10_000, 0) == 1.0, "off"
    assert load_share(100, 100) == 1.0
    assert load_share(200, 100) == 0.5
    assert load_share(10_000, 100) == 0.25
