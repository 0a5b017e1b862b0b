"""Geometry and tensors against transformers' own processor."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.trusted_media import prepare
from cluster.errors import ConfigError, MediaError
from cluster.media.processor import MediaProcessor
from cluster.types.media import MediaProbe, Modality

RELAXED = settings(max_examples=40, derandomize=True)
SIDE = st.integers(1, 400)


def call_kwargs(demo_model):
    return json.loads((demo_model / "mm_processor_kwargs.json").read_text())


def count(out, hf_processor, modality):
    return int((out["input_ids"] == getattr(hf_processor, f"{modality}_token_id")).sum())


@RELAXED
@given(width=SIDE, height=SIDE)
def test_image_geometry_and_tensors_are_the_processors(processor, hf_processor, demo_model, width, height):
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    try:
        geometry = processor.layout(MediaProbe(Modality.IMAGE, width, height)).geometry
    except MediaError as error:
        assert "aspect ratio must be smaller than 200" in error.message and max(width, height) > 200 * min(
            width, height
        )
        return
    out = hf_processor(text=[hf_processor.image_token], images=[Image.fromarray(pixels)], return_tensors="pt",
                       **call_kwargs(demo_model))  # fmt: skip
    assert geometry.num_tokens == count(out, hf_processor, Modality.IMAGE)
    assert [list(geometry.grid_thw)] == out["image_grid_thw"].tolist()
    inputs = prepare(processor, Modality.IMAGE, pixels)
    assert set(inputs) == {"pixel_values", "image_grid_thw"}
    for key, tensor in inputs.items():
        torch.testing.assert_close(tensor, out[key], rtol=0, atol=0)


@RELAXED
@given(width=st.integers(4, 200), height=st.integers(4, 200), num_frames=st.integers(1, 32))
def test_video_geometry_and_tensors_are_the_processors(
    processor, hf_processor, demo_model, width, height, num_frames
):
    frames = np.random.default_rng(0).integers(0, 255, (num_frames, height, width, 3), dtype=np.uint8)
    geometry = processor.layout(MediaProbe(Modality.VIDEO, width, height, num_frames, 4.0)).geometry
    given_frames = torch.from_numpy(frames).permute(0, 3, 1, 2)
    out = hf_processor(text=[hf_processor.video_token], videos=[given_frames], return_tensors="pt",
                       **call_kwargs(demo_model))  # fmt: skip
    assert geometry.num_tokens == count(out, hf_processor, Modality.VIDEO)
    assert [list(geometry.grid_thw)] == out["video_grid_thw"].tolist()
    assert geometry.second_per_grid == float(out["video_second_per_grid"][0])
    inputs = prepare(processor, Modality.VIDEO, frames)
    assert set(inputs) == {"pixel_values_videos", "video_grid_thw"}
    for key, tensor in inputs.items():
        torch.testing.assert_close(tensor, torch.as_tensor(out[key]), rtol=0, atol=0)


@RELAXED
@given(num_samples=st.integers(1, 160_000))
def test_audio_geometry_and_tensors_are_the_processors(processor, hf_processor, demo_model, num_samples):
    waveform = np.random.default_rng(0).standard_normal(num_samples).astype(np.float32) * 0.1
    try:
        geometry = processor.layout(MediaProbe(Modality.AUDIO, num_samples=num_samples)).geometry
    except MediaError as error:
        assert "too short" in error.message and num_samples <= 320
        return
    out = hf_processor(
        text=[hf_processor.audio_token], audio=[waveform], return_tensors="pt", **call_kwargs(demo_model)
    )
    assert geometry.num_tokens == count(out, hf_processor, Modality.AUDIO)
    assert geometry.num_mel_frames == int(out["feature_attention_mask"].sum())
    inputs = prepare(processor, Modality.AUDIO, waveform)
    assert set(inputs) == {"input_features", "feature_attention_mask"}
    for key, tensor in inputs.items():
        torch.testing.assert_close(tensor, out[key], rtol=0, atol=0)


def test_audio_longer_than_the_feature_extractor_takes_is_refused(processor):
    with pytest.raises(MediaError, match=r"item 4 \(audio\): longer than 10 seconds"):
        processor.layout(MediaProbe(Modality.AUDIO, num_samples=160_001), item_idx=4)
    assert processor.settings.audio_cap() == 160_000


def test_extreme_aspect_ratios_are_refused(processor):
    with pytest.raises(
        MediaError, match=r"item 0 \(image\): this model's processor refuses it: .*aspect ratio"
    ):
        processor.layout(MediaProbe(Modality.IMAGE, 1, 400))


def test_what_cannot_be_served_is_refused_by_name_and_text_models_have_no_processor(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "paligemma", "vision_config": {}}')
    with pytest.raises(ConfigError, match=r"'paligemma' is not supported: .* seen in both directions"):
        MediaProcessor.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(ConfigError, match="no usable processor"):
        MediaProcessor.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    assert MediaProcessor.load(tmp_path) is None
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError):
        MediaProcessor.load(tmp_path)


@pytest.mark.parametrize(
    ("family", "processor_class", "cap"),
    [("qwen2_vl", "Qwen2VLProcessor", True), ("qwen2_5_vl", "Qwen2_5_VLProcessor", False)],
)
def test_the_other_families_agree_with_their_processors(demo_model, tmp_path, family, processor_class, cap):
    from transformers.video_utils import VideoMetadata

    for file in demo_model.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, tmp_path / file.name)
    config = {"model_type": family, "vision_config": {}, "image_token_id": 1016, "video_token_id": 1018}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kwargs = {
        "videos_kwargs": {"size": {"shortest_edge": 1024, "longest_edge": 32768}, "cap_pixels_per_frame": cap}
    }
    (tmp_path / "mm_processor_kwargs.json").write_text(json.dumps(kwargs))
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    saved["video_processor"]["max_video_tokens"] = 200
    (tmp_path / "processor_config.json").write_text(json.dumps(saved | {"processor_class": processor_class}))
    loaded = MediaProcessor.load(tmp_path)
    assert loaded is not None and type(loaded.transformers_processor).__name__ == processor_class
    hf = loaded.transformers_processor
    for num_frames, height, width in [(2, 100, 60), (7, 33, 90), (16, 120, 160), (30, 48, 48)]:
        frames = np.zeros((num_frames, height, width, 3), np.uint8)
        metadata = VideoMetadata(num_frames, fps=3.0, frames_indices=list(range(num_frames)))
        out = hf(text=[hf.video_token], videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
                 video_metadata=[metadata], return_tensors="pt", **kwargs)  # fmt: skip
        geometry = loaded.layout(MediaProbe(Modality.VIDEO, width, height, num_frames, 3.0)).geometry
        assert geometry.grid_thw is not None
        assert [list(geometry.grid_thw)] == out["video_grid_thw"].tolist()
        assert geometry.num_tokens == count(out, hf, Modality.VIDEO)
        theirs = out.get("second_per_grid_ts")
        assert geometry.second_per_grid == (None if theirs is None else pytest.approx(float(theirs[0])))
        inputs = prepare(loaded, Modality.VIDEO, frames)
        assert inputs["pixel_values_videos"].shape == out["pixel_values_videos"].shape
