"""Conversations of stages B and C, with the few questions of `data`."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.demo_model.training import data, media
from deploy.demo_model.training.build import Processor
from deploy.demo_model.training.data import Turn
from deploy.demo_model.training.features import MediaFeatures
from deploy.demo_model.training.pretrain import draw_training_image
from deploy.demo_model.training.rows import RowWriter, TrainingRow
from deploy.demo_model.training.speech import WordBank, disturb, make_clip
from deploy.demo_model.training.tokenizer import SYSTEM_PROMPTS

FRAME_COUNTS = (4, 6, 6, 8, 8, 8, 8, 8, 12, 16)
ROWS_OF_STEP = {
    "learn": {
        "image": (12, 1.0),
        "images": (6, 0.6),
        "video": (6, 0.6),
        "audio": (16, 1.0),
        "both": (6, 0.6),
        "text": (8, 0.5),
    },
    "refine": {
        "yes_no": (14, 1.5),
        "drill": (40, 1.5),
        "image": (6, 0.5),
        "images": (6, 0.6),
        "video": (6, 0.6),
        "audio": (12, 0.8),
        "both": (4, 0.5),
        "text": (8, 0.6),
        "count": (16, 1.0),
        "sum": (16, 0.6),
    },
}
DECIDE_RATIO = 0.5
SMALLEST_IMAGE_RATIO = 0.55
SYSTEM_RATIO = 0.1
TEXT_FIRST_RATIO = 0.15


class RowMaker:
    """Draws conversations; each method takes everything random from the generator.

    `is_early`: with the questions of stage B.
    """

    def __init__(
        self, processor: Processor, features: MediaFeatures, words: WordBank, is_early: bool
    ) -> None:
        self._writer = RowWriter(processor, features)
        self._words, self._is_early = words, is_early

    @property
    def pad_id(self) -> int:
        """The id behind a row's end."""
        return self._writer.pad_id

    def image_row(self, rng: random.Random) -> TrainingRow:
        """One image and a few questions."""
        row = TrainingRow()
        pixels, shape, colour = draw_training_image(rng, SMALLEST_IMAGE_RATIO)
        turns = [
            data.image_question(rng, shape, colour, self._is_early) for _ in range(rng.choice((1, 2, 3, 3)))
        ]
        return self._converse(rng, row, self._writer.image(row, pixels), turns)

    def yes_no_row(self, rng: random.Random) -> TrainingRow:
        """One image and up to three questions of yes or no, sometimes after its description."""
        row = TrainingRow()
        pixels, shape, colour = draw_training_image(rng, SMALLEST_IMAGE_RATIO)
        turns = [data.yes_no_question(rng, shape, colour) for _ in range(rng.choice((1, 3, 3)))]
        if len(turns) > 1 and rng.random() < 0.2:
            turns[0] = Turn(rng.choice(data.DESCRIBE_QUESTIONS), data.describe_image(shape, colour))
        return self._converse(rng, row, self._writer.image(row, pixels), turns)

    def drill_row(self, rng: random.Random) -> TrainingRow:
        """One or two facts, each with a question that it decides."""
        turns = [data.comparison_drill(rng) for _ in range(rng.choice((1, 1, 2)))]
        return self._converse(rng, TrainingRow(), [], turns)

    def images_row(self, rng: random.Random) -> TrainingRow:
        """Two or three images in order."""
        row = TrainingRow()
        images = [draw_training_image(rng, SMALLEST_IMAGE_RATIO) for _ in range(rng.choice((2, 2, 2, 3)))]
        media_ids = [token for pixels, *_ in images for token in self._writer.image(row, pixels)]
        truths = [(shape, colour) for _, shape, colour in images]
        return self._converse(rng, row, media_ids, [data.images_question(rng, truths)])

    def video_row(self, rng: random.Random) -> TrainingRow:
        """One clip."""
        row = TrainingRow()
        frames, shape, colour, direction = data.make_video(rng, rng.choice(FRAME_COUNTS))
        turns = [data.video_question(rng, shape, colour, direction, self._is_early) for _ in range(3)]
        if not self._is_early and rng.random() < DECIDE_RATIO:
            turns[rng.randrange(3)] = data.video_yes_no_question(rng, direction)
        return self._converse(rng, row, self._writer.video(rng, row, media.disturb_video(rng, frames)), turns)

    def audio_row(self, rng: random.Random) -> TrainingRow:
        """One sound of one to four words."""
        row = TrainingRow()
        clip = disturb(rng, make_clip(rng, self._words, rng.choice((1, 1, 2, 3, 3, 4))))
        turns = [data.audio_question(rng, clip.words, self._is_early) for _ in range(rng.choice((1, 2)))]
        if not self._is_early and len(clip.words) == 1 and rng.random() < DECIDE_RATIO:
            turns[-1] = data.audio_yes_no_question(rng, clip.words[0])
        return self._converse(rng, row, self._writer.audio(row, clip), turns)

    def image_audio_row(self, rng: random.Random) -> TrainingRow:
        """An image and a word in either order."""
        row = TrainingRow()
        pixels, shape, colour = draw_training_image(rng, SMALLEST_IMAGE_RATIO)
        clip = disturb(rng, make_clip(rng, self._words, 1))
        image_ids, audio_ids = self._writer.image(row, pixels), self._writer.audio(row, clip)
        media_ids = image_ids + audio_ids if rng.random() < 0.6 else audio_ids + image_ids
        turns = [data.image_audio_question(rng, shape, colour, clip.words[0])]
        if rng.random() < 0.4:
            extra = rng.choice(
                (
                    data.image_question(rng, shape, colour, self._is_early),
                    data.audio_question(rng, clip.words, self._is_early),
                )
            )
            turns.insert(rng.randrange(2), extra)
        return self._converse(rng, row, media_ids, turns)

    def text_row(self, rng: random.Random) -> TrainingRow:
        """No media."""
        turns = [data.text_question(rng, self._is_early) for _ in range(3)]
        return self._converse(rng, TrainingRow(), [], turns)

    def count_row(self, rng: random.Random) -> TrainingRow:
        """One or two counts."""
        turns = [data.count_question(rng) for _ in range(rng.choice((1, 1, 2)))]
        return self._converse(rng, TrainingRow(), [], turns)

    def sum_row(self, rng: random.Random) -> TrainingRow:
        """One to three sums."""
        turns = [data.sum_question(rng) for _ in range(rng.choice((1, 2, 3)))]
        return self._converse(rng, TrainingRow(), [], turns)

    def _converse(
        self, rng: random.Random, row: TrainingRow, media_ids: list[int], turns: Sequence[Turn]
    ) -> TrainingRow:
        """Write the chat template's text: the media belong to the first user turn."""
        if rng.random() < SYSTEM_RATIO:
            self._writer.append(
                row, self._writer.encode(f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n")
            )
        is_text_first = rng.random() < TEXT_FIRST_RATIO
        for turn_idx, turn in enumerate(turns):
            attached = media_ids if turn_idx == 0 else []
            question = self._writer.encode(turn.question)
            content = question + attached if is_text_first else attached + question
            prompt = (
                self._writer.encode("<|im_start|>user\n")
                + content
                + self._writer.encode("<|im_end|>\n<|im_start|>assistant\n")
            )
            self._writer.append(row, prompt)
            self._writer.append_answer(row, turn)
            self._writer.append(row, self._writer.encode("\n"))
        return row


@dataclass(frozen=True)
class RowGroup:
    """Rows of one kind in a training step, and the weight of their loss."""

    name: str
    draw: Callable[[random.Random], TrainingRow]
    num_rows: int
    weight: float


def groups_of_step(maker: RowMaker, stage: str, divisor: int) -> tuple[RowGroup, ...]:
    """What one step of a stage trains on, or one of `divisor` equal parts of it."""
    draws = {
        "image": maker.image_row,
        "images": maker.images_row,
        "video": maker.video_row,
        "audio": maker.audio_row,
        "both": maker.image_audio_row,
        "text": maker.text_row,
        "yes_no": maker.yes_no_row,
        "drill": maker.drill_row,
        "count": maker.count_row,
        "sum": maker.sum_row,
    }
    return tuple(
        RowGroup(name, draws[name], max(1, num_rows // divisor), weight)
        for name, (num_rows, weight) in ROWS_OF_STEP[stage].items()
    )
