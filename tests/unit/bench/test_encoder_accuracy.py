"""The demo model's answers about media looked at less closely: plain ones are those of `generate`, and
settings do what they say."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import av
import msgspec
import pytest

from bench.encoder import report
from bench.encoder.accuracy import FPS, EvaluatedModel, clip, compare, message, settings_of
from cluster.types.media import Modality
from deploy.demo_model.training.build import load
from deploy.demo_model.training.evaluate import Sample, answer, draw_samples
from deploy.demo_model.training.media import decode_mp4
from deploy.demo_model.training.speech import WordBank

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model"
SEED = 3


@pytest.fixture(scope="module")
def model() -> EvaluatedModel:
    return EvaluatedModel(DEMO)


def drawn(task: str, num_samples: int = 2) -> list[Sample]:
    return draw_samples(task, SEED, WordBank([]), num_samples)


def as_decoded(sample: Sample) -> Sample:
    """What the encoder finds in the sample's files, an even number of frames."""
    clips = [decode_mp4(clip(frames))[: len(frames) // 2 * 2] for frames in sample.videos]
    return dataclasses.replace(sample, videos=clips)


def test_plain_answers_are_those_of_generate(model):
    samples = [sample for task in ("two images in order", "describe the video") for sample in drawn(task, 1)]
    for sample in samples:
        assert model.answers([model.prepare(message(sample))]) == answer(*load(DEMO), [as_decoded(sample)])


def test_settings_leave_as_many_rows_as_they_say(model):
    found = {
        counts["setting"]: counts
        for counts in compare(model, drawn("describe the video"), settings_of(Modality.VIDEO))
    }
    plain = found["plain"]
    rows = {name: counts["rows"] / plain["rows"] for name, counts in found.items()}
    assert plain["right"] == plain["samples"] == plain["items"] == 2 and plain["lost"] == plain["won"] == 0
    assert all(counts["right"] + counts["lost"] == 2 for counts in found.values())
    assert rows["spatial_pooling 2"] == 1 / 4 and rows["spatial_pooling 4"] == 1 / 16
    assert rows["temporal_pooling 2"] == pytest.approx(1 / 2, abs=0.15)
    assert rows["max_media_tokens: half"] <= 1 / 2 and rows["max_media_tokens: a quarter"] <= 1 / 4
    assert found["num_frames 2"]["rows"] == 2 * 16 and found["num_frames 4"]["rows"] == 2 * 32
    assert rows["scenes"] == 1 and rows["keyframes"] < 1


def test_other_rows_than_the_door_said_are_an_error(model):
    asked = model.prepare(message(drawn("shape", 1)[0]))
    (item,) = asked.items
    said = msgspec.structs.replace(item.geometry, num_tokens=item.geometry.num_tokens + 1)
    wrong = dataclasses.replace(asked, items=(msgspec.structs.replace(item, geometry=said),))
    with pytest.raises(RuntimeError, match=f"rows, not {said.num_tokens}"):
        model.features([wrong])


def test_clips_have_a_key_frame_a_second():
    (sample,) = drawn("video direction", 1)
    (frames,) = sample.videos
    with av.open(io.BytesIO(clip(frames)), "r") as container:
        keys = [packet.is_keyframe for packet in container.demux(video=0) if packet.size]
    assert keys == [idx % FPS == 0 for idx in range(len(frames))]


def test_the_table_has_a_line_for_each_setting_and_adds_up_tasks():
    shared = {"type": "accuracy", "media": "image", "samples": 200, "items": 200}
    records = [
        {**shared, "task": task, "setting": setting, "rows": rows, "right": right, "lost": lost, "won": 1}
        for task, setting, rows, right, lost in (
            ("shape", "plain", 4000, 200, 0), ("shape", "pooled", 1000, 151, 50),
            ("colour", "plain", 2000, 199, 0), ("colour", "pooled", 500, 199, 1),
        )
    ]  # fmt: skip
    assert report.accuracy_table(records) == [
        "| images, 200 a task | rows an item | ÷ plain | shape | colour | lost, won |",
        "| --- | --- | --- | --- | --- | --- |",
        "| plain | 15.0 | 1.00 | 100.0% | 99.5% | 0, 2 |",
        "| pooled | 3.8 | 0.25 | 75.5% | 99.5% | 51, 2 |",
    ]
