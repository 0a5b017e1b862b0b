"""Measure the shipped folder on fresh samples, through the stock processor and `generate`, by exact match:

    python -m deploy.demo_model.training.evaluate --model deploy/demo_model --seed 7

Images come in many sizes as PNG or JPEG, clips as raw frames or h264 mp4, sounds as 16-bit samples of voices,
speeds and pitches that training never used. Weights are the bf16 file's, computed in float32.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from deploy.demo_model.training import data
from deploy.demo_model.training.build import Model, Processor, load
from deploy.demo_model.training.data import Turn
from deploy.demo_model.training.natural import NATURAL_TASKS, UNRELATED, unrelated_samples
from deploy.demo_model.training.samples import Maker, Sample, draw_image, draw_sound, draw_video
from deploy.demo_model.training.speech import SAMPLE_RATE, WordBank
from deploy.demo_model.training.words import test_words

BATCH = 16
NUM_WRONG = 3
MAX_NEW_TOKENS = 110


def image_sample(ask: Callable[[random.Random, str, str], Turn]) -> Maker:
    """A task about one image."""

    def make(rng: random.Random, _words: WordBank) -> Sample:
        picture, shape, colour = draw_image(rng)
        return Sample(ask(rng, shape, colour), images=[picture])

    return make


def two_images(rng: random.Random, _words: WordBank) -> Sample:
    """Two images, to be described in order."""
    pictures = [draw_image(rng) for _ in range(2)]
    answer = " ".join(
        f"Image {idx}: {colour} {shape}." for idx, (_, shape, colour) in enumerate(pictures, start=1)
    )
    return Sample(Turn("Describe each image.", answer), images=[picture for picture, *_ in pictures])


def video_direction(rng: random.Random, _words: WordBank) -> Sample:
    """Which way."""
    frames, _, _, direction = draw_video(rng)
    return Sample(Turn(rng.choice(data.DIRECTION_QUESTIONS), direction), videos=[frames])


def video_description(rng: random.Random, _words: WordBank) -> Sample:
    """Shape, colour and direction in one sentence."""
    frames, shape, colour, direction = draw_video(rng)
    return Sample(
        Turn("Describe the video.", f"The video shows a {colour} {shape} moving {direction}."),
        videos=[frames],
    )


def video_yes_no(rng: random.Random, _words: WordBank) -> Sample:
    """Whether it moves some way."""
    frames, _, _, direction = draw_video(rng)
    return Sample(data.video_yes_no_question(rng, direction), videos=[frames])


def sound_yes_no(rng: random.Random, words: WordBank) -> Sample:
    """Whether some word was said."""
    sound, (word,) = draw_sound(rng, words, 1)
    return Sample(data.audio_yes_no_question(rng, word), sounds=[sound])


def spoken_words(num_words: int) -> Maker:
    """Words in order."""

    def make(rng: random.Random, words: WordBank) -> Sample:
        sound, said = draw_sound(rng, words, num_words)
        return Sample(Turn("What was said?", " ".join(said)), sounds=[sound])

    return make


def image_and_sound(rng: random.Random, words: WordBank) -> Sample:
    """An image and a sound in one prompt."""
    picture, shape, colour = draw_image(rng)
    sound, (word,) = draw_sound(rng, words, 1)
    return Sample(data.image_audio_question(rng, shape, colour, word), images=[picture], sounds=[sound])


TASKS: dict[str, Maker] = {
    "shape": image_sample(lambda rng, shape, _colour: Turn(rng.choice(data.SHAPE_QUESTIONS), shape)),
    "colour": image_sample(lambda rng, _shape, colour: Turn(rng.choice(data.COLOUR_QUESTIONS), colour)),
    "yes or no": image_sample(data.yes_no_question),
    "describe the image": image_sample(
        lambda _rng, shape, colour: Turn("Describe the image.", data.describe_image(shape, colour))
    ),
    "two images in order": two_images,
    "video direction": video_direction,
    "describe the video": video_description,
    "one spoken word": spoken_words(1),
    "three spoken words": spoken_words(3),
    "image and sound": image_and_sound,
    "text": lambda rng, _words: Sample(data.text_question(rng)),
    "yes or no, video": video_yes_no,
    "yes or no, sound": sound_yes_no,
    "text: count": lambda rng, _words: Sample(data.count_question(rng)),
    "text: add": lambda rng, _words: Sample(data.sum_question(rng)),
    **NATURAL_TASKS,
}
ALL_TASKS = (*TASKS, UNRELATED)
YES_NO_TASKS = tuple(task for task in TASKS if task.startswith("yes or no"))


def draw_samples(task: str, seed: int, words: WordBank, num_samples: int) -> list[Sample]:
    """The first samples of a task; they do not depend on the other tasks."""
    rng = random.Random(f"evaluate {seed} {task}")
    if task == UNRELATED:
        return unrelated_samples(rng)
    return [TASKS[task](rng, words) for _ in range(num_samples)]


@torch.no_grad()
def answer(model: Model, processor: Processor, kwargs: dict, samples: list[Sample]) -> list[str]:
    """Greedy answers of one batch of samples of a kind."""
    prompts = [
        processor.apply_chat_template(
            sample.messages(), tools=sample.offered(), tokenize=False, add_generation_prompt=True
        )
        for sample in samples
    ]
    inputs = processor(
        text=prompts,
        images=[image for sample in samples for image in sample.images] or None,
        videos=[video for sample in samples for video in sample.videos] or None,
        audio=[sound for sample in samples for sound in sample.sounds] or None,
        sampling_rate=SAMPLE_RATE,
        padding=True,
        return_tensors="pt",
        **kwargs,
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new_tokens = output[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]


def last_word(text: str) -> str:
    """The last word of an answer: for a question of yes or no, the decision behind the named fact. "" for an
    empty text.
    """
    return (text.removesuffix(".").split() or [""])[-1]


def evaluate_folder(
    folder: Path, seed: int, cache: Path, num_samples: int = 400, tasks: Sequence[str] = ALL_TASKS
) -> dict:
    """Accuracy of the tasks: {"seed", "num_samples", "accuracy": {task: ratio}, "last_word", "wrong"}.

    "last_word" has the tasks of yes or no, with only that word compared; "wrong" some wrong answers of each
    task.
    """
    model, processor, kwargs = load(folder)
    words = test_words(seed, cache)
    accuracy, last_words, wrong = {}, {}, {}
    for task in tasks:
        samples = draw_samples(task, seed, words, num_samples)
        answers = []
        for first in range(0, len(samples), BATCH):
            answers += answer(model, processor, kwargs, samples[first : first + BATCH])
        pairs = [(sample.turn, given) for sample, given in zip(samples, answers, strict=True)]
        missed = [(turn, given) for turn, given in pairs if turn.answer != given]
        accuracy[task] = round(1 - len(missed) / len(samples), 4)
        if task in YES_NO_TASKS:
            num_right = sum(last_word(turn.answer) == last_word(given) for turn, given in pairs)
            last_words[task] = round(num_right / num_samples, 4)
        wrong[task] = [
            f"{turn.question} -> {given} (right: {turn.answer})" for turn, given in missed[:NUM_WRONG]
        ]
        print(f"{task}: {accuracy[task]:.1%}", flush=True)
    return {
        "seed": seed,
        "num_samples": num_samples,
        "accuracy": accuracy,
        "last_word": last_words,
        "wrong": wrong,
    }


def write_table(table: dict, path: Path) -> None:
    """Write the table as JSON."""
    path.write_text(json.dumps(table, indent=2) + "\n")


def main() -> None:
    """Evaluate a folder and write its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--samples", type=int, default=400, help="for each task")
    parser.add_argument("--tasks", nargs="+", choices=ALL_TASKS, default=ALL_TASKS)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/demo_model_cache"))
    parser.add_argument("--out", type=Path, help="JSON file (default: only print)")
    arguments = parser.parse_args()
    table = evaluate_folder(
        arguments.model, arguments.seed, arguments.cache, arguments.samples, arguments.tasks
    )
    if arguments.out:
        write_table(table, arguments.out)
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
