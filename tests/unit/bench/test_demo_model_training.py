"""Training of the demo model: deterministic from its seed, on features equal to the stock processors'."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from deploy.demo_model.training import data  # noqa: E402
from deploy.demo_model.training.build import PROCESSOR_KWARGS, Model, Processor, build  # noqa: E402
from deploy.demo_model.training.calls import Tool  # noqa: E402
from deploy.demo_model.training.conversations import RowMaker  # noqa: E402
from deploy.demo_model.training.data import Turn  # noqa: E402
from deploy.demo_model.training.dialogues import DialogueMaker  # noqa: E402
from deploy.demo_model.training.evaluate import last_word  # noqa: E402
from deploy.demo_model.training.features import MediaFeatures, num_audio_tokens, num_mel_frames  # noqa: E402
from deploy.demo_model.training.joint import Checkpoint, MovingMean, mean_with, train_jointly  # noqa: E402
from deploy.demo_model.training.rows import KEY_WEIGHT, NO_LABEL, RowWriter  # noqa: E402
from deploy.demo_model.training.schedule import Schedule  # noqa: E402
from deploy.demo_model.training.speech import SAMPLE_RATE, Spoken, Voice, WordBank, make_clip  # noqa: E402

ONE_ROW_PER_GROUP = 1000


@pytest.fixture(scope="module")
def built() -> tuple[Model, Processor]:
    return build(seed=0)


def tones() -> WordBank:
    """A bank with one pure tone for each word: no synthesizer."""
    times = np.arange(SAMPLE_RATE // 4) / SAMPLE_RATE
    return WordBank(
        [
            Spoken(word, Voice("tone", 0, 0), np.sin(2 * np.pi * (200 + 40 * idx) * times).astype(np.float16))
            for idx, word in enumerate(data.WORDS)
        ]
    )


def train_two_steps(
    built: tuple[Model, Processor],
    seed: int,
    stage: str = "refine",
    checkpoint: Path | None = None,
    num_steps: int = 2,
) -> dict[str, Any]:
    model, processor = copy.deepcopy(built[0]), built[1]
    schedule = Schedule(
        num_steps=num_steps, num_warmup_steps=1, peak=1e-3, num_flat_steps=1, num_cosine_steps=4
    )
    lines: list[str] = []
    rng = random.Random(seed)
    train_jointly(
        model,
        processor,
        tones(),
        rng,
        stage,
        schedule,
        lines.append,
        divisor=ONE_ROW_PER_GROUP,
        checkpoint=Checkpoint(checkpoint, rng, save_every=2) if checkpoint else None,
    )
    assert lines[-1].startswith(f"step {num_steps}/{num_steps}")
    return model.state_dict()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one worker."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_run_that_goes_on_from_its_checkpoint_gives_the_same_bits(
    built: tuple[Model, Processor], tmp_path: Path, alone: None
) -> None:
    whole = train_two_steps(built, seed=1, stage="converse", checkpoint=tmp_path / "whole", num_steps=4)
    train_two_steps(built, seed=1, stage="converse", checkpoint=tmp_path / "cut", num_steps=2)
    resumed = train_two_steps(built, seed=5, stage="converse", checkpoint=tmp_path / "cut", num_steps=4)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_training_row_reads_as_the_chat_template_writes_it(built: tuple[Model, Processor]) -> None:
    processor: Any = built[1]
    tool = Tool("move_robot", ("direction",))
    maker = DialogueMaker(processor, MediaFeatures(processor), tones())
    row = maker.call_row(random.Random(0), tool, Turn("Go left.", tool.call("left")), result="done")
    call = {"type": "function", "function": {"name": "move_robot", "arguments": {"direction": "left"}}}
    messages = [
        {"role": "user", "content": "Go left."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "The tool says: done"},
    ]
    text = processor.apply_chat_template(messages, tools=[tool.function()], tokenize=False)
    assert processor.tokenizer.decode(row.ids) == text


def test_only_values_of_an_object_under_a_schema_count(built: tuple[Model, Processor]) -> None:
    processor: Any = built[1]
    ids, is_value = RowWriter(processor, MediaFeatures(processor)).encode_json(
        '{"shape": "circle", "count": 2}'
    )
    values = [token for token, counts in zip(ids, is_value, strict=True) if counts]
    assert processor.tokenizer.decode(values).replace(" ", "") == '"circle",2}'


@pytest.mark.slow
def test_two_runs_of_one_seed_give_the_same_bits(built: tuple[Model, Processor]) -> None:
    first, second = train_two_steps(built, seed=1), train_two_steps(built, seed=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = train_two_steps(built, seed=2)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_key_of_an_answer_weighs_more_and_everything_else_nothing(
    built: tuple[Model, Processor],
) -> None:
    processor: Any = built[1]
    maker = RowMaker(processor, MediaFeatures(processor), tones(), is_early=False)
    row = maker.drill_row(random.Random(0))
    heavy = [token for token, weight in zip(row.ids, row.weights, strict=True) if weight == KEY_WEIGHT]
    assert processor.tokenizer.decode(heavy).replace(".", "").split()[0] in ("yes", "no")
    for label, weight in zip(row.labels, row.weights, strict=True):
        assert (label == NO_LABEL) == (weight == 0)


def test_training_patches_equal_the_processors(built: tuple[Model, Processor]) -> None:
    processor: Any = built[1]
    pixels, *_ = data.make_image(random.Random(0), (80, 96))
    frames, *_ = data.make_video(random.Random(0), num_frames=5)
    expected = processor(
        text=["<|IMAGE|><|VIDEO|>"], images=[pixels], videos=[frames], return_tensors="pt", **PROCESSOR_KWARGS
    )
    features = MediaFeatures(processor)
    for given, patches, grid in (
        (pixels[None], expected["pixel_values"], expected["image_grid_thw"]),
        (frames, expected["pixel_values_videos"], expected["video_grid_thw"]),
    ):
        own_patches, own_grid = features.patchify(given)
        assert own_grid == grid[0].tolist()
        torch.testing.assert_close(own_patches, patches, atol=1e-5, rtol=0)


def test_only_the_last_word_decides_yes_or_no() -> None:
    assert [last_word(text) for text in ("It is blue, so no.", "yes", "")] == ["no", "yes", ""]


def test_training_mels_equal_the_processors(built: tuple[Model, Processor]) -> None:
    processor: Any = built[1]
    clip = make_clip(random.Random(0), tones(), num_words=3)
    expected = processor(
        text=["<|AUDIO|>"], audio=[clip.samples], sampling_rate=SAMPLE_RATE, return_tensors="pt"
    )
    mels, mask = MediaFeatures(processor).log_mel([clip.samples])
    num_frames = num_mel_frames(len(clip.samples))
    assert mask.sum() == expected["feature_attention_mask"].sum() == num_frames
    torch.testing.assert_close(mels, expected["input_features"][:, :, :num_frames], atol=1e-4, rtol=0)
    assert (expected["input_ids"] == processor.audio_token_id).sum() == num_audio_tokens(num_frames)


def test_a_stage_may_end_with_the_mean_of_its_weights_and_those_before(
    built: tuple[Model, Processor],
) -> None:
    before, model = built[0], copy.deepcopy(built[0])
    with torch.no_grad():
        for weight in model.parameters():
            weight += 4
    mean_with(model, before, 0.25)
    for weight, earlier in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(weight, earlier + 3)


def test_a_stage_may_end_with_the_moving_mean_of_its_weights() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    mean, last = MovingMean({"weight": weight}, decay=0.75), MovingMean({"weight": weight}, decay=0.0)
    with torch.no_grad():
        weight += 4
    mean.update()
    last.update()
    last.apply()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 4.0))
    mean.apply()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1.0))
