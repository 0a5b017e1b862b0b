"""What a door makes of a request's media: looked at, left out, reduction. Real files, and a processor with
round numbers."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest

from bench.media_files import animation, audio, image, scenes, video, video_of
from cluster.errors import ContextLengthError, MediaError, RequestError, UnsupportedError
from cluster.media.fetch import FetchedMedia
from cluster.media.opener import SurveyOrder, look
from cluster.media.settings import MediaLimits, MediaSettings, naming
from cluster.media.sources import MediaSource
from cluster.types.media import FrameStrategy, MediaGeometry, MediaLayout, MediaOptions, MediaProbe, Modality
from router.calls import MediaNote, MediaRules
from router.prompts.media import Content, MeasuredItem, MediaPlanner, _with_reduction
from router.prompts.media_budget import Reduction, ReductionReason

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
AS_NEEDED = MediaRules()
SIDE = 4  # of a patch, pixels; a row is a patch of an image, or of two frames
OWN_PIXELS = 64 * 64  # the most that the model sees of an image or a frame, if the client does not say


class FakeProcessor:
    """Everything square; 10 rows a second of sound."""

    fingerprint = "fake"
    settings = MediaSettings()

    def __init__(
        self,
        modalities=(IMAGE, VIDEO, AUDIO),
        *,
        has_one_size: bool = False,
        bounds_whole_clips: bool = False,
    ):
        self.modalities = modalities
        self.has_one_size = has_one_size
        self.bounds_whole_clips = bounds_whole_clips

    def patch_side(self, modality: Modality) -> int:
        return SIDE

    def layout(self, probe, options, sound=None, *, item_idx=0) -> MediaLayout:
        if probe.modality not in self.modalities:
            raise UnsupportedError(f"this model takes no {probe.modality} input")
        if self.has_one_size and options.max_pixels is not None:
            raise UnsupportedError("one size")
        parts = [(probe.modality, self._geometry(probe, options))]
        if sound is not None:
            parts.append((AUDIO, self._geometry(sound, MediaOptions())))
        runs = tuple((i, geometry.num_tokens) for i, (_, geometry) in enumerate(parts))
        return MediaLayout("<rows>" * len(parts), runs, tuple(parts))

    def _geometry(self, probe: MediaProbe, options: MediaOptions) -> MediaGeometry:
        if probe.modality is AUDIO:
            return MediaGeometry(probe.num_samples // 1600)
        own = OWN_PIXELS
        if self.bounds_whole_clips and probe.num_frames:
            own = 4 * OWN_PIXELS // probe.num_frames
        pixels = min(probe.width * probe.height, options.max_pixels or own)
        patches = max(1, math.isqrt(pixels) // SIDE // options.spatial_pooling)
        time = max(1, probe.num_frames // 2)
        grid = None if self.has_one_size else (time, patches, patches)
        return MediaGeometry(time * patches**2, grid)


def fetched(data: bytes) -> FetchedMedia:
    return FetchedMedia(data, hashlib.sha256(data).digest())


def planner(*held: str, **options) -> MediaPlanner:
    processor: Any = FakeProcessor(**options)
    return MediaPlanner(processor, lambda name: name in held)


def content_of(
    modality: Modality, media: FetchedMedia, options: MediaOptions, decodes: bool = False
) -> Content:
    """Opened in this process, by the code of the others."""
    settings = FakeProcessor.settings
    order = SurveyOrder(modality, options, settings, timeout_s=settings.limits.max_decode_s, decodes=decodes)
    return Content(media, look(order, media.data))


def contents_of(sources, contents, rules: MediaRules) -> list[Content | MediaError]:
    """`contents`: bytes, or why there are none."""
    found: list[Content | MediaError] = []
    for idx, (source, content) in enumerate(zip(sources, contents, strict=True)):
        try:
            if isinstance(content, MediaError):
                raise content
            with naming(source.modality, idx, source.param):
                media = fetched(content)
                found.append(content_of(source.modality, media, source.options, rules.omits_bad))
        except MediaError as error:
            found.append(error)
    return found


def look_at(plans: MediaPlanner, *items, rules: MediaRules = AS_NEEDED, **options):
    """items: (modality, bytes or error). Options are those of images and videos."""
    of = {kind: MediaOptions() if kind is AUDIO else MediaOptions(**options) for kind in Modality}
    sources = [
        MediaSource(kind, "", f"messages[0].content[{idx}]", of[kind]) for idx, (kind, _) in enumerate(items)
    ]
    return plans.measure(sources, contents_of(sources, [content for _, content in items], rules), rules)


def looks_at(plans: MediaPlanner, *items, **options) -> list[MeasuredItem]:
    looks, notes = look_at(plans, *items, **options)
    assert not notes
    return looks


SMALL = image(32, 32)  # 64 rows
CLIP = video(16, 4, (64, 64))  # 8 frames, as it lasts 4 s: 1024 rows
SOUND = audio(1.0, 16_000)  # 10 rows


def rows(looks) -> list[int]:
    return [look.num_tokens for look in looks]


def test_items_are_laid_out_in_order_as_the_client_asked():
    looks = looks_at(planner(), (IMAGE, SMALL), (AUDIO, SOUND), (VIDEO, CLIP), max_pixels=256, max_frames=4)
    assert [look.item_idx for look in looks] == [0, 1, 2]
    assert rows(looks) == [16, 10, 32] and looks[2].probe.num_frames == 4


def test_a_bad_item_ends_the_request_and_is_named():
    with pytest.raises(MediaError, match=r"item 1 \(image\)"):
        look_at(planner(), (IMAGE, SMALL), (IMAGE, b"not an image"))
    with pytest.raises(MediaError, match="gone"):
        look_at(planner(), (IMAGE, MediaError("gone")))


def test_a_modality_that_the_model_does_not_take_is_refused_even_where_bad_items_are_left_out():
    for plans in (planner(modalities=(IMAGE,)), MediaPlanner(None, lambda _: False)):
        with pytest.raises(UnsupportedError, match="no audio input"):
            look_at(plans, (AUDIO, SOUND), rules=MediaRules(omits_bad=True))


WITH_HEAD = image(96, 96, "JPEG")
WITH_HEAD = WITH_HEAD[: len(WITH_HEAD) // 2]  # its header says all that a layout needs


def test_bad_items_are_left_out_where_the_client_prefers_that():
    items = [(IMAGE, WITH_HEAD), (IMAGE, SMALL), (VIDEO, SMALL), (AUDIO, MediaError("item 3 (audio): 404"))]
    assert rows(looks_at(planner(), items[0])) == [256], "nobody looks further than its header"
    looks, notes = look_at(planner(), *items, rules=MediaRules(omits_bad=True))
    assert [look.item_idx for look in looks] == [1]
    assert [(note.item, note.modality, note.reason) for note in notes] == [
        (0, "image", "error"), (2, "video", "error"), (3, "audio", "error"),
    ]  # fmt: skip
    assert all(f"item {note.item} ({note.modality})" in (note.error or "") for note in notes)


@pytest.mark.parametrize("omits_bad", [False, True])
@pytest.mark.parametrize(
    "silent",
    [video_of(scenes(20)), *(animation(form=form) for form in ("GIF", "PNG", "WEBP", "AVIF"))],
    ids=["mp4", "GIF", "PNG", "WEBP", "AVIF"],
)
def test_a_clip_without_a_sound_track_is_seen_alone(silent, omits_bad):
    items, plans = [(VIDEO, video_of(scenes(20), sound_s=2.0)), (VIDEO, silent)], planner()
    looks, notes = look_at(plans, *items, rules=MediaRules(omits_bad=omits_bad), audio_in_video=True)
    assert not notes and [len(plans.items(look, "")) for look in looks] == [2, 1]
    (plain,) = looks_at(plans, items[1])
    assert looks[1].layout == plain.layout and looks[1].probe == plain.probe


def test_a_sound_track_that_cannot_be_used_is_no_silence():
    settings = MediaSettings(MediaLimits(max_audio_s=1.0))
    order = SurveyOrder(VIDEO, MediaOptions(audio_in_video=True), settings, timeout_s=60.0)
    with pytest.raises(MediaError, match="longer than 1 seconds"):
        look(order, video_of(scenes(20), sound_s=2.0))


def test_errors_name_the_place_of_the_item_that_is_too_much():
    plans = planner()
    looks = looks_at(plans, (IMAGE, SMALL), (AUDIO, SOUND), (IMAGE, SMALL))
    for limit, place in ((63, 0), (64, 1), (73, 1), (74, 2), (137, 2)):
        with pytest.raises(ContextLengthError) as refused:
            plans.reduce(looks, limit, MediaRules(is_exact=True), ReductionReason.BUDGET)
        assert refused.value.param == f"messages[0].content[{place}]"
        with pytest.raises(RequestError) as refused:
            plans.check_rows(looks, 64, limit)
        assert refused.value.param == f"messages[0].content[{place}]"
    with pytest.raises(MediaError) as refused:
        plans.check_rows(looks[1:], 63, 1000)
    assert refused.value.param == "messages[0].content[2]"
    for bad in (b"bad", MediaError("gone", param="messages[0].content[1]")):
        with pytest.raises(MediaError) as refused:
            look_at(plans, (IMAGE, SMALL), (VIDEO, bad))
        assert refused.value.param == "messages[0].content[1]"
    with pytest.raises(MediaError) as refused:
        looks_at(plans, (IMAGE, SMALL), (VIDEO, CLIP), max_frames=0)
    assert refused.value.param == "messages[0].content[1]"
    (item,) = plans.items(looks[2], "")
    assert (item.item_idx, item.param) == (2, "messages[0].content[2]")


def test_reduction_asks_the_processor_a_bounded_number_of_times_for_each_item():
    """All items of different sizes, so that no answer is known."""

    class Counting(FakeProcessor):
        num_layouts = 0

        def layout(self, *args, **options):
            self.num_layouts += 1
            return super().layout(*args, **options)

    counts = []
    for num_items in (16, 64):
        processor: Any = Counting()
        plans = MediaPlanner(processor, lambda _: False)
        looks = looks_at(plans, *((IMAGE, image(64 + 4 * idx, 64)) for idx in range(num_items)))
        processor.num_layouts = 0
        plans.reduce(looks, sum(rows(looks)) // 3, MediaRules(), ReductionReason.BUDGET)
        counts.append(processor.num_layouts)
    assert counts[1] == 4 * counts[0] <= 16 * 64


def test_a_model_without_media_names_the_place_of_the_first_item():
    with pytest.raises(UnsupportedError, match="takes no audio input") as refused:
        look_at(MediaPlanner(None, lambda _: False), (AUDIO, SOUND))
    assert refused.value.param == "messages[0].content[0]"


def test_a_heard_clip_is_two_items_and_its_sound_is_the_same_whichever_frames_are_taken():
    plans = planner()
    clip = (VIDEO, video_of(scenes(20), sound_s=2.0))
    (whole,) = looks_at(plans, clip, audio_in_video=True)
    (short,) = looks_at(plans, clip, audio_in_video=True, max_frames=2)
    seen, heard = plans.items(whole, "a")
    other_seen, other_heard = plans.items(short, "a")
    assert (seen.modality, heard.modality) == (VIDEO, AUDIO)
    assert heard == other_heard and seen.media_hash != other_seen.media_hash
    assert heard.media_hash != plans.items(whole, "b")[1].media_hash


def test_what_fits_is_left_as_it_is():
    looks = looks_at(planner(), (IMAGE, SMALL), (AUDIO, SOUND))
    assert planner().reduce(looks, 74, MediaRules(), ReductionReason.BUDGET) == (looks, [])


def test_a_request_in_too_many_tokens_is_refused_where_it_must_not_be_reduced_or_cannot():
    plans = planner()
    looks = looks_at(plans, (IMAGE, SMALL), (AUDIO, SOUND))
    with pytest.raises(ContextLengthError, match="have 74 tokens; there is room for 73"):
        plans.reduce(looks, 73, MediaRules(is_exact=True), ReductionReason.BUDGET)
    with pytest.raises(ContextLengthError, match="room for 0"):
        plans.reduce(looks, -20, MediaRules(), ReductionReason.BUDGET)
    with pytest.raises(ContextLengthError):
        plans.reduce(looks[1:], 9, MediaRules(), ReductionReason.BUDGET)


def test_frames_go_before_pixels_and_notes_say_what_is_left():
    plans = planner()
    looks = looks_at(plans, (VIDEO, CLIP), (IMAGE, SMALL), (AUDIO, SOUND))
    assert rows(looks) == [1024, 64, 10]
    reduced, notes = plans.reduce(looks, 800, MediaRules(), ReductionReason.BUDGET)
    assert rows(reduced)[1:] == [64, 10] and reduced[1] is looks[1]
    assert notes == [MediaNote(0, "video", "budget", 512, 4)] and rows(reduced)[0] == 512
    reduced, notes = plans.reduce(looks, 300, MediaRules(), ReductionReason.LOAD)
    assert [note.item for note in notes] == [0, 1] and {note.reason for note in notes} == {"load"}
    assert [note.num_tokens for note in notes] == rows(reduced)[:2] and sum(rows(reduced)) <= 300
    assert notes[0].num_frames == 4 and notes[1].num_frames is None


@pytest.mark.parametrize("size", [(64, 64), (1000, 1000), (1400, 900)])
def test_pixels_are_taken_from_what_the_model_sees_not_from_the_file(size):
    plans = planner()
    looks = looks_at(plans, (IMAGE, image(*size)))
    assert rows(looks) == [256]
    reduced, (note,) = plans.reduce(looks, 130, MediaRules(), ReductionReason.BUDGET)
    assert 100 <= rows(reduced)[0] <= 130 and note.max_pixels < OWN_PIXELS


def test_no_item_is_looked_at_more_closely_when_another_has_to_make_room():
    plans = planner()
    looks = looks_at(plans, (IMAGE, image(500, 500)), (IMAGE, image(64, 64)))
    reduced, _ = plans.reduce(looks, 400, MediaRules(), ReductionReason.BUDGET)
    assert rows(reduced)[0] == rows(reduced)[1] and 350 <= sum(rows(reduced)) <= 400


def test_the_clients_own_bounds_stay_bounds():
    plans = planner()
    looks = looks_at(plans, (IMAGE, image(640, 640)), min_pixels=900, max_pixels=1024)
    reduced, (note,) = plans.reduce(looks, 40, MediaRules(), ReductionReason.BUDGET)
    assert rows(looks) == [64] and 30 <= rows(reduced)[0] <= 40
    least = reduced[0].options.min_pixels
    assert least is not None and note.max_pixels is not None and least <= note.max_pixels < 1024


def test_pooled_items_are_cut_from_their_size_before_pooling():
    plans = planner()
    looks = looks_at(plans, (IMAGE, image(640, 640)), spatial_pooling=3)
    assert rows(looks) == [25]
    reduced, (note,) = plans.reduce(looks, 24, MediaRules(), ReductionReason.BUDGET)
    assert rows(reduced) == [16] and note.max_pixels <= OWN_PIXELS


def test_what_encoders_compute_is_known_before_pooling_and_bounded():
    plans = planner()
    looks = looks_at(plans, (IMAGE, image(640, 640)), (VIDEO, CLIP), spatial_pooling=8)
    assert rows(looks) == [4, 16]
    items = [item for look in looks for item in plans.items(look, "")]
    assert [item.num_call_rows for item in items] == [256, 1024]
    plans.check_rows(looks, 256, 1280)
    with pytest.raises(MediaError, match=r"item 0 \(image\): .* 256 rows for one picture; at most 255"):
        plans.check_rows(looks, 255, 1280)
    with pytest.raises(RequestError, match="1280 rows for this request; at most 1279"):
        plans.check_rows(looks, 256, 1279)
    sounds = looks_at(plans, (AUDIO, SOUND))
    plans.check_rows(sounds, 1, 10)


def test_clips_of_a_model_with_one_size_lose_frames_alone():
    plans = planner(has_one_size=True)
    looks = looks_at(plans, (VIDEO, CLIP), (IMAGE, SMALL))
    reduced, notes = plans.reduce(looks, 600, MediaRules(), ReductionReason.BUDGET)
    assert rows(reduced) == [512, 64] and [note.item for note in notes] == [0]
    with pytest.raises(ContextLengthError):
        plans.reduce(looks, 500, MediaRules(), ReductionReason.BUDGET)


def test_clips_that_are_bounded_as_a_whole_lose_frames_all_the_same():
    """Half as many frames could be twice as large, and nothing would be saved."""
    plans = planner(bounds_whole_clips=True)
    looks = looks_at(plans, (VIDEO, video(16, 4, (256, 256))))
    assert looks[0].probe.num_frames == 8 and rows(looks) == [4 * 11**2]
    reduced, (note,) = plans.reduce(looks, 370, MediaRules(), ReductionReason.BUDGET)
    assert note.num_frames == 6 and rows(reduced) == [3 * 11**2]


@pytest.mark.parametrize("strategy", list(FrameStrategy))
def test_every_strategy_keeps_within_the_budget(strategy):
    plans = planner()
    clip = video_of(scenes(5, 4, 6, 5), fps=4, gop_size=2)
    looks = looks_at(plans, (VIDEO, clip), strategy=strategy)
    for most in (500, 300, 100):
        reduced, notes = plans.reduce(looks, most, MediaRules(), ReductionReason.BUDGET)
        assert 0 < rows(reduced)[0] <= most and notes[0].num_frames == reduced[0].probe.num_frames


def test_what_encoders_hold_costs_nothing_and_is_not_touched():
    plans = planner()
    looks = looks_at(plans, (IMAGE, image(64, 64)), (IMAGE, image(60, 60)))
    held = plans.items(looks[0], "me")[0].media_hash
    relieved, notes = planner(held).relieve(looks, 0.5, "me")
    assert relieved[0] is looks[0] and [note.item for note in notes] == [1]
    assert notes[0].reason == "load" and rows(relieved)[1] <= 0.5 * rows(looks)[1]
    _, of_another = planner(held).relieve(looks, 0.5, "you")
    assert [note.item for note in of_another] == [0, 1], "what one tenant showed is new of another"


def test_sounds_keep_their_rows_under_load_and_keep_no_image_from_being_reduced():
    plans = planner()
    looks = looks_at(plans, (AUDIO, audio(9.0, 16_000)), (IMAGE, SMALL))
    assert rows(looks) == [90, 64]
    relieved, notes = plans.relieve(looks, 0.5, "")
    assert rows(relieved)[0] == 90 and 16 <= rows(relieved)[1] <= 32 and [note.item for note in notes] == [1]


def test_what_cannot_be_reduced_is_encoded_as_it_is_under_load():
    plans = planner(has_one_size=True)
    looks = looks_at(plans, (IMAGE, SMALL))
    assert plans.relieve(looks, 0.25, "") == (looks, [])
    assert plans.relieve([], 0.25, "") == ([], [])


@pytest.mark.parametrize(
    ("options", "reduction", "after"),
    [
        (MediaOptions(), Reduction(), MediaOptions()),
        (MediaOptions(fps=2.0), Reduction(max_frames=4), MediaOptions(fps=2.0, max_frames=4)),
        (MediaOptions(min_frames=8, max_frames=8), Reduction(4), MediaOptions(min_frames=4, max_frames=4)),
        (MediaOptions(min_frames=2, max_frames=8), Reduction(4), MediaOptions(min_frames=2, max_frames=4)),
        (MediaOptions(min_pixels=90), Reduction(max_pixels=50), MediaOptions(min_pixels=50, max_pixels=50)),
        (MediaOptions(spatial_pooling=2), Reduction(4, 50), MediaOptions(max_frames=4, max_pixels=50, spatial_pooling=2)),
    ],
)  # fmt: skip
def test_a_cut_lowers_what_a_client_asked_for_and_leaves_the_rest(options, reduction, after):
    assert _with_reduction(options, reduction) == after
