"""Layouts, asked of processors about items without content, against what the same processors make of real
ones; for every family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bench.trusted_media import prepare
from cluster.config.families import family_of_type
from cluster.errors import MediaError, UnsupportedError
from cluster.media.calls import cut_runs
from cluster.media.processor import MediaProcessor
from cluster.media.settings import VideoSampling
from cluster.model.encoder import EncoderModel
from cluster.types.media import MediaLayout, MediaOptions, MediaProbe, Modality
from tests.flow.family_folders import FAMILIES, FamilyFolder, save_family

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
RELAXED = settings(max_examples=5, derandomize=True)
SOUND_ALONE = [
    "qwen2_audio", "qwen3_asr", "voxtral", "audioflamingo3", "musicflamingo", "glmasr",
    "moss_transcribe_diarize", *({"omniasr"} & set(FAMILIES)),
]  # fmt: skip
OMNI = ["qwen2_5_omni", "qwen3_omni"]
NEMOTRON = [*({"nemotron_h_omni"} & set(FAMILIES))]
IMAGE_FAMILIES = [name for name in FAMILIES if name not in SOUND_ALONE]
AREA_IMAGE_FAMILIES = ("paddleocr_vl", "hunyuan_vl", "cosmos3_edge", "hyperclovax_vision_v2")
AREA_VIDEO_FAMILIES = [
    name
    for name in IMAGE_FAMILIES
    if name.startswith(("qwen", "glm", "exaone4_5", "cosmos3_omni", "cohere_compass", "lfm3_vl"))
]
AREA_FAMILIES = [*AREA_VIDEO_FAMILIES, *AREA_IMAGE_FAMILIES]
VIDEO_FAMILIES = [
    *AREA_VIDEO_FAMILIES, "llava_next_video", "llava_onevision", "internvl", "smolvlm", "muse_glimmer",
    "muse_spark", *NEMOTRON,
]  # fmt: skip
POOLED_FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni"]
SIDE = st.integers(1, 120)
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
Family = tuple[FamilyFolder, MediaProcessor]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Family]:
    loaded = {}
    for name in FAMILIES:
        folder = save_family(name, tmp_path_factory.mktemp(name))
        media = MediaProcessor.load(folder.path)
        assert media is not None
        loaded[name] = (folder, media)
    return loaded


def written_out(media: MediaProcessor, layout: MediaLayout) -> str:
    """The layout's text with every run at its length."""
    tokens = [media.row_tokens[kind] for kind, _ in layout.parts]
    pieces, rest = [], layout.text
    for part, length in layout.runs:
        before, rest = rest.split(tokens[part], 1)
        pieces += [before, tokens[part] * length]
    return "".join([*pieces, rest])


def assert_equal_tensors(ours: dict[str, torch.Tensor], theirs: dict) -> None:
    assert ours
    for key, tensor in ours.items():
        if key in theirs:  # the others are for the processor itself
            torch.testing.assert_close(tensor, torch.as_tensor(theirs[key]), rtol=0, atol=0)
    pixels = {"pixel_values", "pixel_values_videos", "input_features"}
    assert pixels & set(ours) == pixels & set(theirs)


def assert_same(family: Family, probe: MediaProbe, array: np.ndarray, **given: object) -> None:
    """Text, counts and tensors of one item, against the full processor's for a prompt that is this item."""
    folder, media = family
    processor, modality = folder.processor, probe.modality
    try:
        layout = media.layout(probe)
    except MediaError:
        with pytest.raises(ValueError):
            their_outputs(folder, modality, **given)
        return
    theirs = their_outputs(folder, modality, **given)
    token_ids = processor.tokenizer(written_out(media, layout))["input_ids"]
    assert token_ids == torch.as_tensor(theirs["input_ids"])[0].tolist()
    row_id = processor.tokenizer.convert_tokens_to_ids(media.row_tokens[modality])
    assert layout.geometry.num_tokens == token_ids.count(row_id)
    if f"{modality}_grid_thw" in theirs:
        assert layout.geometry.grid_thw == tuple(theirs[f"{modality}_grid_thw"][0].tolist())
    assert_equal_tensors(prepare(media, modality, array), theirs)


def their_outputs(folder: FamilyFolder, modality: Modality, **given: object) -> dict:
    return outputs_for_an_item(folder.processor, modality, **given, **folder.call_kwargs)


def outputs_for_an_item(processor: Any, modality: Modality, **given: object) -> dict:
    token = getattr(processor, f"{modality}_token")
    text = getattr(processor, f"{modality}_placeholder_token", token)
    if type(processor).__name__ != "HunYuanVLProcessor":
        return dict(processor(text=[text], return_tensors="pt", **given))
    text = f"{processor.image_start_token}{text}{processor.image_end_token}"  # it refuses less
    outputs = dict(processor(text=[text], return_tensors="pt", **given))
    return {**outputs, "input_ids": outputs["input_ids"][:, 1:-1]}


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
@RELAXED
@given(width=SIDE, height=SIDE)
def test_an_images_layout_and_tensors_are_the_processors(families, name, width, height):
    folder, media = families[name]
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    channels_first = torch.from_numpy(pixels).permute(2, 0, 1)
    assert_same(
        (folder, media), MediaProbe(IMAGE, width, height), pixels,
        images=[channels_first], input_data_format="channels_first",
    )  # fmt: skip


def test_pixels_stay_bytes_up_to_the_encoder_unless_the_processor_does_more_than_move_them(families):
    images = np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)
    clips = np.stack([images] * 2)
    whole = {
        (name, modality)
        for modality, array, names in ((IMAGE, images, IMAGE_FAMILIES), (VIDEO, clips, VIDEO_FAMILIES))
        for name in names
        if torch.uint8 not in {each.dtype for each in families[name][1].begin(modality, array).values()}
    }
    assert whole == {
        (name, IMAGE)
        for name in (
            "deepseek_vl_hybrid",
            "deepseek_ocr2",
            "step3p7",
            "idefics3",
            "smolvlm",
            "gemma4",
            "gemma4_small",  # scaled alone
            "llama4",  # in bfloat16
            "lfm2_vl",  # cut into patches
            *NEMOTRON,  # resized as floats
        )
    } | {(name, VIDEO) for name in NEMOTRON}


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
@RELAXED
@given(
    width=st.integers(4, 70),
    height=st.integers(4, 70),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    fps=st.sampled_from([1.0, 5.0, 29.97]),
)
def test_a_clips_layout_and_tensors_are_the_processors(families, name, width, height, steps, fps):
    from transformers.video_utils import VideoMetadata

    folder, media = families[name]
    frame_idx = tuple(int(idx) for idx in np.cumsum(steps))
    total = frame_idx[-1] + 3
    frames = np.random.default_rng(width).integers(0, 255, (len(steps), height, width, 3), dtype=np.uint8)
    probe = MediaProbe(VIDEO, width, height, len(steps), len(steps) / total * fps, 0, frame_idx, fps, total)
    metadata = VideoMetadata(total, fps=fps, duration=total / fps, frames_indices=list(frame_idx))
    assert_same(
        (folder, media), probe, frames,
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], video_metadata=[metadata], do_sample_frames=False,
        return_metadata=True, input_data_format="channels_first",
    )  # fmt: skip


@pytest.mark.parametrize("name", [*OMNI, *SOUND_ALONE, *NEMOTRON])
@RELAXED
@given(num_samples=st.integers(1000, 32_000))
def test_a_sounds_layout_and_tensors_are_the_processors(families, name, num_samples):
    folder, media = families[name]
    waveform = np.random.default_rng(0).standard_normal(num_samples).astype(np.float32)
    assert_same((folder, media), MediaProbe(AUDIO, num_samples=num_samples), waveform, audio=[waveform])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_door_and_the_encoder_agree_about_what_a_family_takes(families, name):
    folder, media = families[name]
    assert set(EncoderModel.from_model(folder.model).modalities) == set(media.modalities)


# Options


def real_layout(family: Family, probe: MediaProbe, **given: object) -> tuple[str, dict]:
    """Text and outputs of the processor's own call for a real image."""
    folder, _ = family
    pixels = torch.zeros(3, probe.height, probe.width, dtype=torch.uint8)
    processor = folder.processor
    outputs = outputs_for_an_item(processor, IMAGE, images=[pixels], **given)
    return processor.tokenizer.decode(outputs["input_ids"][0]), outputs


@pytest.mark.parametrize("name", AREA_FAMILIES)
@pytest.mark.parametrize(("least", "most"), [(None, 600), (None, 200), (2000, 9000), (1000, None)])
def test_a_clients_bounds_for_pixels_become_the_processors(families, name, least, most):
    _, media = families[name]
    probe, options = MediaProbe(IMAGE, 50, 37), MediaOptions(min_pixels=least, max_pixels=most)
    unit = family_of_type(families[name][0].model.config.model_type).frames_of_an_image
    size = {"shortest_edge": unit * (least or min(256, most)), "longest_edge": unit * (most or 2048)}
    text, outputs = real_layout(families[name], probe, images_kwargs={"size": size})
    layout = media.layout(probe, options)
    assert written_out(media, layout) == text
    inputs = prepare(media, IMAGE, np.zeros((37, 50, 3), np.uint8), options)
    assert inputs["image_grid_thw"].tolist() == outputs["image_grid_thw"].tolist()
    num_pixels = math.prod(layout.geometry.grid_thw) * 16
    assert (least or 0) <= num_pixels <= (most or num_pixels)


@pytest.mark.parametrize("name", AREA_VIDEO_FAMILIES)
@pytest.mark.parametrize(("least", "most"), [(256, 600), (1500, 4000)])
def test_bounds_for_pixels_hold_for_every_frame_of_a_clip(families, name, least, most):
    _, media = families[name]
    layout = media.layout(MediaProbe(VIDEO, 90, 70, 6, 2.0), MediaOptions(min_pixels=least, max_pixels=most))
    _, height, width = layout.geometry.grid_thw
    assert least <= height * width * 16 <= most


@pytest.mark.parametrize("name", sorted(set(IMAGE_FAMILIES) - set(AREA_FAMILIES)))
def test_bounds_for_pixels_are_refused_by_name_where_the_model_knows_one_size(families, name):
    with pytest.raises(UnsupportedError, match="min_pixels and max_pixels"):
        families[name][1].layout(MediaProbe(IMAGE, 50, 37), MediaOptions(max_pixels=600))


@pytest.mark.parametrize(
    ("modality", "name"),
    [*((IMAGE, name) for name in AREA_FAMILIES), *((VIDEO, name) for name in AREA_VIDEO_FAMILIES)],
)
def test_nothing_is_enlarged_beyond_what_the_model_itself_looks_at(families, name, modality):
    processor = families[name][0].processor
    part = processor.video_processor if modality is VIDEO else processor.image_processor
    own = part.size["longest_edge"]
    if modality is IMAGE:
        own //= family_of_type(families[name][0].model.config.model_type).frames_of_an_image
    probe = MediaProbe(modality, 56, 56, 4 if modality is VIDEO else 0, 2.0)
    for most in (None, 10 * own):
        options = MediaOptions(min_pixels=own + 1, max_pixels=most)
        with pytest.raises(
            MediaError, match=f"item 1 .*min_pixels is {own + 1}; .* limit of {own}"
        ) as refused:
            families[name][1].layout(probe, options, item_idx=1)
        assert refused.value.param == "mm_processor_kwargs.min_pixels"
    families[name][1].layout(probe, MediaOptions(min_pixels=own), item_idx=1)


def test_bounds_that_exclude_each_other_are_refused(families):
    with pytest.raises(MediaError, match=r"item 2 \(image\): min_pixels, 900, .* max_pixels, 600"):
        families["qwen2_vl"][1].layout(
            MediaProbe(IMAGE, 50, 37), MediaOptions(min_pixels=900, max_pixels=600), item_idx=2
        )


@pytest.mark.parametrize("name", POOLED_FAMILIES)
@given(temporal=st.integers(1, 4), spatial=st.integers(1, 4), num_frames=st.integers(1, 9))
@RELAXED
def test_pooling_divides_the_grid_of_rows_and_rounds_up(families, name, temporal, spatial, num_frames):
    _, media = families[name]
    probe = MediaProbe(VIDEO, 70, 45, num_frames, 2.0)
    whole, options = (
        media.layout(probe).geometry,
        MediaOptions(temporal_pooling=temporal, spatial_pooling=spatial),
    )
    layout = media.layout(probe, options)
    time, height, width = whole.grid_thw
    rows = (-(-time // temporal), -(-height // 2 // spatial), -(-width // 2 // spatial))
    assert layout.geometry.grid_thw == (rows[0], rows[1] * 2, rows[2] * 2)
    assert layout.geometry.num_tokens == rows[0] * rows[1] * rows[2]
    assert layout.runs == ((0, layout.geometry.num_tokens),)
    seconds = whole.second_per_grid
    assert layout.geometry.second_per_grid == (None if seconds is None else seconds * temporal)
    frames = np.zeros((num_frames, 45, 70, 3), np.uint8)
    assert prepare(media, VIDEO, frames, options)["video_grid_thw"].tolist() == [list(whole.grid_thw)]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(POOLED_FAMILIES)))
def test_pooling_is_refused_by_name_elsewhere(families, name):
    _, media = families[name]
    probe = MediaProbe(AUDIO, num_samples=9000) if name in SOUND_ALONE else MediaProbe(IMAGE, 50, 37)
    with pytest.raises(UnsupportedError, match="pooling"):
        media.layout(probe, MediaOptions(spatial_pooling=2))


@pytest.mark.parametrize("name", OMNI)
@pytest.mark.parametrize("num_samples", [1600, 14_000, 31_999])
def test_a_heard_clips_rows_alternate_with_its_sounds_as_the_processor_says(families, name, num_samples):
    folder, media = families[name]
    frames = torch.zeros(6, 3, 40, 56, dtype=torch.uint8)
    clip, sound = MediaProbe(VIDEO, 56, 40, 6, 2.0), MediaProbe(AUDIO, num_samples=num_samples)
    layout = media.layout(clip, MediaOptions(audio_in_video=True), sound)
    theirs = folder.processor(
        text=[folder.processor.video_token], videos=[frames], audio=[np.zeros(num_samples, np.float32)],
        load_audio_from_video=True, audio_from_video_indices=[0], do_sample_frames=False, return_tensors="pt",
        **folder.call_kwargs,
    )  # fmt: skip
    assert written_out(media, layout) == folder.processor.tokenizer.decode(theirs["input_ids"][0])
    assert layout.parts == ((VIDEO, media.layout(clip).geometry), (AUDIO, media.layout(sound).geometry))


def test_a_clip_is_heard_by_omni_models_alone(families):
    for name in set(VIDEO_FAMILIES) - set(OMNI):
        with pytest.raises(UnsupportedError, match="audio_in_video"):
            families[name][1].layout(
                MediaProbe(VIDEO, 56, 40, 6, 2.0),
                MediaOptions(audio_in_video=True),
                MediaProbe(AUDIO, num_samples=1600),
            )


class CountedOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_layout_computes_no_values(families):
    """A clamp of a tensor without values takes longer than all the rest."""
    _, media = families["qwen2_5_vl"]
    with CountedOperations() as counted:
        media.layout(MediaProbe(IMAGE, 333, 222), MediaOptions(max_pixels=30_000))
    assert 5 < len(counted.names) < 60 and not any("clamp" in name for name in counted.names), counted.names


# Limits


def test_families_that_cut_windows_take_as_many_as_they_say_and_no_more(families):
    _, media = families["audioflamingo3"]
    assert media.settings.max_audio_samples == 6 * 16_000
    assert media.layout(MediaProbe(AUDIO, num_samples=96_000)).geometry.num_tokens == 3 * 50
    with pytest.raises(MediaError, match=r"item 0 \(audio\): longer than 6 seconds"):
        media.layout(MediaProbe(AUDIO, num_samples=96_001))
    assert families["qwen2_audio"][1].settings.max_audio_samples == 2 * 16_000
    assert families["gemma4"][1].settings.max_audio_samples == 30 * 16_000
    assert families["qwen3_omni"][1].settings.max_audio_samples is None


def test_a_modality_that_the_model_does_not_take_is_refused(families):
    with pytest.raises(UnsupportedError, match="takes no video"):
        families["llava"][1].layout(MediaProbe(VIDEO, 56, 40, 6, 2.0))


def test_a_sound_too_short_to_be_heard_is_refused(families):
    with pytest.raises(MediaError, match="too short"):
        families["qwen2_audio"][1].layout(MediaProbe(AUDIO, num_samples=100))


@pytest.mark.parametrize("name", NEMOTRON)
def test_parakeets_spectrum_needs_two_frames(families, name):
    folder, media = families[name]
    with pytest.raises(MediaError, match="319 samples of sound are fewer than 320"):
        media.layout(MediaProbe(AUDIO, num_samples=319))
    assert media.layout(MediaProbe(AUDIO, num_samples=320)).geometry.num_tokens == 1
    waveform = np.random.default_rng(0).standard_normal(320).astype(np.float32)
    inputs = prepare(media, AUDIO, waveform)
    assert EncoderModel.from_model(folder.model).encode(AUDIO, [inputs])[0].isfinite().all()


def test_sampling_is_what_the_video_processor_asks_for(families):
    sampling = {name: families[name][1].settings.video for name in VIDEO_FAMILIES}
    assert sampling["qwen3_vl"] == VideoSampling(2.0, 4, 8, 2)
    assert sampling["internvl"] == VideoSampling(2.0, 3, 3, 1)
    assert sampling["smolvlm"] == VideoSampling(1.0, 1, 4, 1)


def test_a_layout_that_was_asked_before_is_not_computed_again(families):
    _, media = families["idefics3"]
    probe = MediaProbe(IMAGE, 117, 91)
    assert media.layout(probe) is media.layout(MediaProbe(IMAGE, 117, 91))


@given(st.lists(st.tuples(st.sampled_from(["<a>", "<b>", "x", " <", ""]), st.integers(1, 5)), max_size=8))
def test_runs_are_cut_to_one_token_each_and_counted(pieces):
    text = "".join(piece * count for piece, count in pieces)
    cut, runs = cut_runs(text, ["<a>", "<b>"])
    assert "<a><a>" not in cut and "<b><b>" not in cut
    for part, length in runs:
        token = ("<a>", "<b>")[part]
        before, _, cut = cut.partition(token)
        assert text.startswith(before + token * length)
        text = text[len(before) + length * len(token) :]
    assert text == cut
