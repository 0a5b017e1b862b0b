"""How media are made to fit, by the demo model's own processor: a share of what the model sees, never more than the client asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import media_files
from cluster.media.fetch import FetchedMedia
from cluster.media.processor import MediaProcessor
from cluster.media.sources import MediaSource
from cluster.types.media import MediaOptions, Modality
from router.media import Look, MediaPlanner
from router.media_budget import Reason
from router.openai.translate import MediaRules

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model"
NO_OPTIONS = MediaOptions()


@pytest.fixture(scope="module")
def planner() -> MediaPlanner:
    return MediaPlanner(MediaProcessor.load(DEMO), lambda _: False)


def looks_at(
    planner: MediaPlanner, sizes: Sequence[tuple[int, int]], options: MediaOptions = NO_OPTIONS
) -> list[Look]:
    files = [media_files.image(*size) for size in sizes]
    sources = [MediaSource(Modality.IMAGE, "", options=options)] * len(files)
    fetched = [FetchedMedia(data, hashlib.sha256(data).digest()) for data in files]
    return planner.look(sources, fetched, MediaRules())[0]


def reduced(planner: MediaPlanner, looks: Sequence[Look], max_tokens: int) -> list[Look]:
    return planner.reduce(looks, max_tokens, MediaRules(), Reason.BUDGET)[0]


@pytest.mark.parametrize("size", [(320, 240), (1024, 1024), (50, 70)])
def test_an_image_of_any_size_can_be_reduced_to_a_sixteenth_of_its_rows(planner, size):
    (look,) = looks_at(planner, [size])
    (half,) = reduced(planner, [look], look.num_tokens // 2)
    (least,) = reduced(planner, [look], max(1, look.num_tokens // 16))
    assert look.num_tokens // 4 <= half.num_tokens <= look.num_tokens // 2
    assert 1 <= least.num_tokens <= max(1, look.num_tokens // 16)


def test_images_that_the_model_sees_alike_lose_alike_however_large_their_files_are(planner):
    looks = looks_at(planner, [(128, 128), (1280, 1280)])
    small, large = reduced(planner, looks, 64)
    assert looks[0].num_tokens == looks[1].num_tokens == 64
    assert 16 <= small.num_tokens == large.num_tokens <= 32


def test_nothing_is_seen_larger_than_the_client_asked_for(planner):
    options = MediaOptions(max_pixels=6400, spatial_pooling=4)  # groups at the edges are not full
    looks = looks_at(planner, [(200, 200), (64, 80)], options)
    first, second = reduced(planner, looks, 5)
    assert [look.num_tokens for look in looks] == [4, 2]
    assert first.options == options and second.num_tokens == 1
