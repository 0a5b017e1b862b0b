"""Stage A: give one encoder useful features with throw-away heads, before the language model sees them.

Without it the joint stage stalls near chance. Vision learns shape, colour, place and motion of two-frame
patches from pooled tokens; audio learns, for every 40 ms token, which word is being said (or none). One
thread:

    python -m deploy.demo_model.training.pretrain vision --out vision.pt
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from deploy.demo_model.training import data, media
from deploy.demo_model.training.allocator import keep_freed_memory
from deploy.demo_model.training.build import Model, build
from deploy.demo_model.training.features import MediaFeatures, num_audio_tokens
from deploy.demo_model.training.schedule import PRETRAINING, Schedule, learning_rate, make_optimizers
from deploy.demo_model.training.speech import SpokenClip, WordBank, disturb, make_clip
from deploy.demo_model.training.words import training_words

VISION_BATCH, AUDIO_BATCH = 32, 24
STILL = len(data.DIRECTIONS)
NO_WORD = len(data.WORDS)
SAMPLES_PER_TOKEN = 640
SHAPE_DIFFERENCE = 60

Losses = tuple[torch.Tensor, dict[str, float]]


def place_of_shape(frame: np.ndarray) -> tuple[float, float]:
    """Centre of the pixels that differ from the corner pixel, each coordinate in [-1, 1]."""
    different = np.abs(frame.astype(int) - frame[0, 0].astype(int)).sum(-1) > SHAPE_DIFFERENCE
    rows, columns = np.nonzero(different)
    if not len(rows):
        return 0.0, 0.0
    height, width = different.shape
    return 2 * columns.mean() / width - 1, 2 * rows.mean() / height - 1


def draw_tubelet(rng: random.Random) -> tuple[np.ndarray, int, int, int]:
    """Two frames and their shape, colour and direction as class numbers."""
    if rng.random() < 0.5:
        pixels, shape, colour = draw_training_image(rng)
        return np.stack([pixels, pixels]), data.SHAPES.index(shape), data.COLOUR_NAMES.index(colour), STILL
    frames, shape, colour, direction = data.make_video(rng, rng.choice((6, 8, 8, 12)))
    first = rng.randrange(len(frames) - 1)
    is_still = rng.random() < 0.2
    pair = media.disturb_video(rng, frames[[first, first if is_still else first + 1]])
    motion = STILL if is_still else data.DIRECTIONS.index(direction)
    return pair, data.SHAPES.index(shape), data.COLOUR_NAMES.index(colour), motion


def draw_training_image(rng: random.Random, smallest_ratio: float = 0.0) -> tuple[np.ndarray, str, str]:
    """An image at a size that the model sees; every third went through JPEG.

    `smallest_ratio` of the images have the smallest size, every fifth of the others was resized.
    """
    if smallest_ratio and rng.random() < smallest_ratio:
        size = data.SMALLEST_SIZE
    else:
        size = rng.choice(media.SOURCE_SIZES) if rng.random() < 0.2 else None
    pixels, shape, colour = data.make_image(rng, size)
    return media.fit(media.disturb_image(rng, pixels)), shape, colour


class VisionTask(nn.Module):
    """The vision encoder with its heads."""

    def __init__(self, model: Model, features: MediaFeatures) -> None:
        super().__init__()
        self.encoder = model.model.visual
        self._features = features
        width = 2 * model.config.vision_config.out_hidden_size
        self.shape = nn.Linear(width, len(data.SHAPES))
        self.colour = nn.Linear(width, len(data.COLOURS))
        self.motion = nn.Linear(width, len(data.DIRECTIONS) + 1)
        self.place = nn.Linear(width, 2)

    def forward(self, rng: random.Random) -> Losses:
        """Loss and accuracies on one batch drawn from the generator."""
        tubelets = [draw_tubelet(rng) for _ in range(VISION_BATCH)]
        patches, grids = zip(*(self._features.patchify(frames) for frames, *_ in tubelets), strict=True)
        labels = torch.tensor([classes for _, *classes in tubelets])
        places = torch.tensor([place_of_shape(frames[0]) for frames, *_ in tubelets])
        tokens = self.encoder(torch.cat(patches), grid_thw=torch.tensor(grids)).pooler_output.float()
        pooled = torch.stack(
            [torch.cat([t.mean(0), t.amax(0)]) for t in tokens.split([h * w // 4 for _, h, w in grids])]
        )
        logits = {"shape": self.shape(pooled), "colour": self.colour(pooled), "motion": self.motion(pooled)}
        loss = 4 * functional.mse_loss(self.place(pooled).float(), places.float())
        accuracies = {}
        for column, (name, guess) in enumerate(logits.items()):
            loss = loss + functional.cross_entropy(guess.float(), labels[:, column])
            accuracies[name] = (guess.argmax(-1) == labels[:, column]).float().mean().item()
        return loss, accuracies


def token_labels(clip: SpokenClip, num_tokens: int) -> torch.Tensor:
    """The word said in the middle of each token, or `NO_WORD`."""
    middle = np.arange(num_tokens) * SAMPLES_PER_TOKEN + SAMPLES_PER_TOKEN // 2
    labels = np.full(num_tokens, NO_WORD)
    for word, (begin, end) in zip(clip.words, clip.spans, strict=True):
        labels[(middle >= begin) & (middle < end)] = data.WORDS.index(word)
    return torch.from_numpy(labels)


class AudioTask(nn.Module):
    """The audio encoder with its head."""

    def __init__(self, model: Model, features: MediaFeatures, words: WordBank) -> None:
        super().__init__()
        self.encoder = model.model.audio_tower
        self._encode = model.model.get_audio_features
        self._features, self._words = features, words
        self.word = nn.Linear(model.config.audio_config.output_dim, len(data.WORDS) + 1)

    def forward(self, rng: random.Random) -> Losses:
        """Loss and accuracies on one batch drawn from the generator."""
        clips = [
            disturb(rng, make_clip(rng, self._words, rng.choice((1, 2, 2, 3)))) for _ in range(AUDIO_BATCH)
        ]
        mels, mask = self._features.log_mel([clip.samples for clip in clips])
        tokens = self._encode(mels, mask, return_dict=True).last_hidden_state
        counts = [num_audio_tokens(int(frames)) for frames in mask.sum(1)]
        labels = torch.cat([token_labels(clip, count) for clip, count in zip(clips, counts, strict=True)])
        logits = self.word(tokens).float()
        is_right = (logits.argmax(-1) == labels).float()
        spoken = labels != NO_WORD
        loss = functional.cross_entropy(logits, labels)
        return loss, {"word": is_right[spoken].mean().item(), "silence": is_right[~spoken].mean().item()}


def run(task: nn.Module, rng: random.Random, schedule: Schedule, report: Callable[[str], None]) -> None:
    """Optimize the task's encoder and heads; the schedule counts steps, never seconds."""
    (optimizer,) = make_optimizers(dict(task.named_parameters()), schedule, slow_prefixes=())
    history = defaultdict(list)
    task.train()
    for step in range(schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step) * group["scale"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, accuracies = task(rng)
        loss.backward()
        nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, value in {"loss": loss.item(), **accuracies}.items():
            history[name].append(value)
        if (step + 1) % 100 == 0 or step + 1 == schedule.num_steps:
            means = " ".join(f"{name} {np.mean(values[-100:]):.4f}" for name, values in history.items())
            report(f"step {step + 1}/{schedule.num_steps} {means}")


def pretrain(which: str, seed: int, num_steps: int, cache: Path, report: Callable[[str], None]) -> dict:
    """Train the "vision" or the "audio" encoder and return its weights."""
    model, processor = build(seed)
    features = MediaFeatures(processor)
    torch.manual_seed(seed)
    task = (
        VisionTask(model, features)
        if which == "vision"
        else AudioTask(model, features, training_words(seed, cache))
    )
    run(task, random.Random(f"{which} {seed}"), PRETRAINING[which].with_steps(num_steps), report)
    return task.encoder.state_dict()


def main() -> None:
    """Pretrain one encoder and write its weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=("vision", "audio"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's number")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/demo_model_cache"))
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    num_steps = arguments.steps or PRETRAINING[arguments.which].num_steps
    weights = pretrain(
        arguments.which, arguments.seed, num_steps, arguments.cache, lambda line: print(line, flush=True)
    )
    torch.save(weights, arguments.out)


if __name__ == "__main__":
    main()
