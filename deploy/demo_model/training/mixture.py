"""What one step of stages D to L trains on: how many conversations of each kind, and what they weigh."""

import random
from collections.abc import Callable

from deploy.demo_model.training.conversations import RowGroup
from deploy.demo_model.training.dialogues import DialogueMaker
from deploy.demo_model.training.rows import TrainingRow

ROWS_OF_STEP = {
    "converse": {
        "image": (8, 1.0),
        "claim": (8, 1.2),
        "drill": (12, 1.0),
        "images": (8, 1.2),
        "video": (6, 1.0),
        "sound": (8, 1.2),
        "both": (2, 0.5),
        "switch": (2, 0.5),
        "text": (12, 1.0),
        "elsewhere": (16, 1.0),
        "json": (6, 1.0),
        "tool": (8, 1.0),
    },
    "practise": {
        "image": (8, 1.0),
        "claim": (6, 1.2),
        "drill": (6, 0.8),
        "images": (12, 1.5),
        "video": (6, 1.0),
        "sound": (8, 1.2),
        "both": (4, 1.0),
        "switch": (4, 0.7),
        "text": (10, 1.0),
        "copy": (8, 1.2),
        "elsewhere": (16, 1.2),
        "json": (8, 1.2),
        "tool": (12, 1.5),
    },
    "polish": {
        "image": (8, 1.0),
        "claim": (4, 0.8),
        "drill": (10, 1.0),
        "images": (16, 2.0),
        "video": (4, 0.8),
        "sound": (10, 1.5),
        "both": (4, 0.8),
        "switch": (4, 0.7),
        "text": (14, 1.5),
        "copy": (4, 0.6),
        "elsewhere": (20, 1.5),
        "json": (10, 1.5),
        "tool": (12, 1.5),
    },
    "broaden": {
        "image": (6, 1.2),
        "claim": (4, 1.0),
        "drill": (2, 0.6),
        "images": (8, 1.5),
        "video": (4, 1.2),
        "sound": (8, 1.5),
        "both": (2, 0.8),
        "switch": (2, 0.7),
        "text": (14, 2.0),
        "copy": (4, 1.0),
        "elsewhere": (16, 2.5),
        "json": (8, 1.8),
        "tool": (8, 1.5),
    },
    "vary": {
        "image": (7, 1.2),
        "claim": (6, 1.2),
        "drill": (2, 0.6),
        "images": (6, 1.2),
        "video": (4, 1.0),
        "sound": (8, 1.5),
        "both": (4, 1.0),
        "switch": (2, 0.7),
        "text": (16, 2.0),
        "copy": (6, 1.2),
        "elsewhere": (20, 2.5),
        "json": (10, 1.8),
        "tool": (12, 1.8),
    },
    "widen": {
        "image": (8, 1.3),
        "claim": (8, 1.4),
        "drill": (4, 0.7),
        "images": (6, 1.2),
        "video": (6, 1.2),
        "sound": (9, 1.6),
        "both": (3, 0.8),
        "switch": (2, 0.6),
        "text": (16, 2.0),
        "plain": (4, 0.6),
        "copy": (4, 0.8),
        "elsewhere": (22, 2.6),
        "json": (10, 1.8),
        "tool": (14, 2.0),
    },
    "extend": {
        "image": (7, 1.2),
        "claim": (14, 1.8),
        "drill": (4, 0.6),
        "images": (6, 1.3),
        "video": (4, 1.0),
        "sound": (14, 2.2),
        "both": (2, 0.6),
        "switch": (2, 0.6),
        "text": (20, 2.4),
        "plain": (2, 0.5),
        "copy": (4, 0.8),
        "elsewhere": (30, 3.0),
        "json": (8, 1.6),
        "tool": (12, 1.8),
    },
    "gather": {
        "image": (10, 1.5),
        "claim": (12, 1.7),
        "drill": (2, 0.5),
        "images": (6, 1.3),
        "video": (4, 1.0),
        "sound": (14, 2.2),
        "both": (2, 0.6),
        "switch": (2, 0.6),
        "text": (18, 2.2),
        "plain": (2, 0.5),
        "copy": (2, 0.6),
        "elsewhere": (30, 3.0),
        "json": (8, 1.7),
        "tool": (12, 2.0),
    },
    "decline": {
        "image": (6, 1.2),
        "claim": (8, 1.5),
        "drill": (2, 0.4),
        "images": (4, 1.1),
        "video": (4, 1.0),
        "sound": (8, 1.6),
        "both": (2, 0.6),
        "switch": (2, 0.6),
        "text": (10, 1.8),
        "plain": (2, 0.5),
        "copy": (2, 0.6),
        "elsewhere": (36, 4.0),
        "json": (6, 1.5),
        "tool": (12, 2.2),
    },
}
CUT_RATIO = 0.8  # of rows with a fixed answer at their end: it is long, and its beginning decides


def groups_of_step(maker: DialogueMaker, stage: str, divisor: int) -> tuple[RowGroup, ...]:
    """What one step of stages D to L trains on, or one of `divisor` equal parts of it."""

    def json_row(rng: random.Random) -> TrainingRow:
        return maker.images_json_row(rng) if rng.random() < 0.15 else maker.json_row(rng)

    draws = {
        "image": maker.image_row,
        "claim": maker.claim_row,
        "drill": maker.drill_row,
        "images": maker.images_row,
        "video": maker.video_row,
        "sound": maker.sound_row,
        "both": maker.both_row,
        "switch": maker.switch_row,
        "text": maker.text_row,
        "plain": maker.plain_row,
        "copy": maker.copy_row,
        "elsewhere": maker.elsewhere_row,
        "json": json_row,
        "tool": maker.tool_row,
    }

    def shortened(draw: Callable[[random.Random], TrainingRow]) -> Callable[[random.Random], TrainingRow]:
        def drawn(rng: random.Random) -> TrainingRow:
            row = draw(rng)
            if row.num_needed and rng.random() < CUT_RATIO:
                row.cut(row.num_needed)
            return row

        return drawn

    return tuple(
        RowGroup(name, shortened(draws[name]), max(1, num_rows // divisor), weight)
        for name, (num_rows, weight) in ROWS_OF_STEP[stage].items()
    )
