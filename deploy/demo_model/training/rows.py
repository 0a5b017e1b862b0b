"""Training rows: conversations as token ids, labels, loss weights and encoder inputs.

A `TrainingRow` holds one conversation; `RowWriter` writes into it what the chat template would write.
`collate` pads rows of like length into one model input; only answers carry labels.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deploy.demo_model.training.build import Processor
from deploy.demo_model.training.data import Turn
from deploy.demo_model.training.features import (
    MediaFeatures,
    num_audio_tokens,
    num_image_tokens,
    num_mel_frames,
)
from deploy.demo_model.training.speech import SpokenClip

NO_LABEL = -100
LENGTH_STEP = 16
KEY_WEIGHT = 3.0
SECONDS_PER_GRID = (1.0, 1.0, 1.0, 0.5)
MAX_KEPT_TEXTS = 20_000
_KEY = re.compile(r'\{?"\w+": ?')


@dataclass
class TrainingRow:
    """One conversation: ids, labels and loss weights of equal length, and its media in prompt order.

    An answer's tokens weigh 1, those of its key `KEY_WEIGHT`, all others 0. `num_needed`: how many
    tokens a row has to have whose last answer may be cut short; 0: all.
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    image_patches: list[torch.Tensor] = field(default_factory=list)
    image_grids: list[list[int]] = field(default_factory=list)
    video_patches: list[torch.Tensor] = field(default_factory=list)
    video_grids: list[list[int]] = field(default_factory=list)
    seconds_per_grid: list[float] = field(default_factory=list)
    clips: list[np.ndarray] = field(default_factory=list)
    num_needed: int = 0

    def cut(self, length: int) -> None:
        """Keep the first tokens; no media stand behind them."""
        del self.ids[length:], self.labels[length:], self.weights[length:]


class RowWriter:
    """Appends turns and media to rows; the text of one processor."""

    def __init__(self, processor: Processor, features: MediaFeatures) -> None:
        self._tokenizer = processor.tokenizer
        self._features = features
        self._ids_of_text: dict[str, list[int]] = {}

    @property
    def pad_id(self) -> int:
        """The id behind a row's end."""
        return self._tokenizer.pad_token_id

    def image(self, row: TrainingRow, pixels: np.ndarray) -> list[int]:
        patches, grid = self._features.patchify(pixels[None])
        row.image_patches.append(patches)
        row.image_grids.append(grid)
        return self._placeholders("vision", "<|IMAGE|>", num_image_tokens(grid))

    def video(self, rng: random.Random, row: TrainingRow, frames: np.ndarray) -> list[int]:
        patches, grid = self._features.patchify(frames)
        row.video_patches.append(patches)
        row.video_grids.append(grid)
        row.seconds_per_grid.append(rng.choice(SECONDS_PER_GRID))
        return self._placeholders("vision", "<|VIDEO|>", num_image_tokens(grid))

    def audio(self, row: TrainingRow, clip: SpokenClip) -> list[int]:
        row.clips.append(clip.samples)
        count = num_audio_tokens(num_mel_frames(len(clip.samples)))
        return self._placeholders("audio", "<|AUDIO|>", count)

    def _placeholders(self, kind: str, token: str, count: int) -> list[int]:
        return self.encode(f"<|{kind}_bos|>") + self.encode(token) * count + self.encode(f"<|{kind}_eos|>")

    def encode(self, text: str) -> list[int]:
        if text in self._ids_of_text:
            return self._ids_of_text[text]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(self._ids_of_text) < MAX_KEPT_TEXTS:
            self._ids_of_text[text] = ids
        return ids

    def encode_json(self, text: str) -> tuple[list[int], list[bool]]:
        """Ids, and which of them belong to a value and not to a key or its object's bracket."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_frame = [False] * len(text)
        for match in _KEY.finditer(text):
            is_frame[match.start() : match.end()] = [True] * (match.end() - match.start())
        return encoded["input_ids"], [not is_frame[begin] for begin, _ in encoded["offset_mapping"]]

    def append(self, row: TrainingRow, ids: list[int]) -> None:
        row.ids += ids
        row.labels += [NO_LABEL] * len(ids)
        row.weights += [0.0] * len(ids)

    def append_weighted(self, row: TrainingRow, ids: Sequence[int], weights: Sequence[float]) -> None:
        """An answer whose tokens have weights of their own."""
        end = self.encode("<|im_end|>")
        row.ids += [*ids, *end]
        row.labels += [*ids, *end]
        row.weights += [*weights, *[1.0] * len(end)]

    def append_answer(self, row: TrainingRow, turn: Turn) -> None:
        ids, end = self.encode(turn.answer), self.encode("<|im_end|>")
        num_key_tokens = len(self.encode(turn.key)) if turn.key else 0
        row.ids += ids + end
        row.labels += ids + end
        row.weights += [1.0] * (len(ids) - num_key_tokens) + [KEY_WEIGHT] * num_key_tokens + [1.0] * len(end)


def collate(rows: Sequence[TrainingRow], pad_id: int, features: MediaFeatures) -> dict[str, torch.Tensor]:
    """The model's keyword arguments for the rows, padded on the right, and "answer_weights" like the
    labels. Lengths are multiples of `LENGTH_STEP`: a product of a new size costs oneDNN a compilation.
    """
    longest = -(-max(len(row.ids) for row in rows) // LENGTH_STEP) * LENGTH_STEP
    ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), NO_LABEL)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    weights = torch.zeros(len(rows), longest)
    for row_idx, row in enumerate(rows):
        length = len(row.ids)
        ids[row_idx, :length] = torch.tensor(row.ids)
        labels[row_idx, :length] = torch.tensor(row.labels)
        mask[row_idx, :length] = 1
        weights[row_idx, :length] = torch.tensor(row.weights)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "answer_weights": weights}
    images = [patches for row in rows for patches in row.image_patches]
    videos = [patches for row in rows for patches in row.video_patches]
    clips = [clip for row in rows for clip in row.clips]
    if images:
        batch["pixel_values"] = torch.cat(images)
        batch["image_grid_thw"] = torch.tensor([grid for row in rows for grid in row.image_grids])
    if videos:
        batch["pixel_values_videos"] = torch.cat(videos)
        batch["video_grid_thw"] = torch.tensor([grid for row in rows for grid in row.video_grids])
        batch["video_second_per_grid"] = torch.tensor([s for row in rows for s in row.seconds_per_grid])
    if clips:
        batch["input_features"], batch["feature_attention_mask"] = features.log_mel(clips)
    return batch
