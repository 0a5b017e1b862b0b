"""Write the small files under `deploy/demo_model/examples`, each one answered rightly by the shipped model:

    python -m deploy.demo_model.training.examples --model deploy/demo_model

Candidates follow from the seed; the first that the model answers as it should is kept. `answers.json` lists
each file with its question and answer.
"""

import argparse
import io
import json
import random
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from deploy.demo_model.training import data, media
from deploy.demo_model.training.build import load
from deploy.demo_model.training.data import Turn
from deploy.demo_model.training.evaluate import answer
from deploy.demo_model.training.samples import Sample
from deploy.demo_model.training.speech import WordBank, make_clip
from deploy.demo_model.training.words import test_words

NUM_CANDIDATES = 50
THREE_WORDS = ("red", "circle", "seven")
JPEG_QUALITY = 90


@dataclass(frozen=True)
class Example:
    """A file, a function that makes a candidate for it, and the answer that the model must give."""

    name: str
    make: Callable[[random.Random, WordBank], bytes]
    turn: Turn


def png(shape: str, colour: str) -> Callable[[random.Random, WordBank], bytes]:
    """A 128x128 picture."""
    return lambda rng, _words: media.png_bytes(data.make_image(rng, (128, 128), shape, colour)[0])


def jpeg(shape: str, colour: str) -> Callable[[random.Random, WordBank], bytes]:
    """A 320x240 photograph of a shape."""
    return lambda rng, _words: media.jpeg_bytes(
        data.make_image(rng, (240, 320), shape, colour)[0], JPEG_QUALITY
    )


def mp4(direction: str) -> Callable[[random.Random, WordBank], bytes]:
    """Two seconds of a moving red circle."""
    return lambda rng, _words: media.mp4_bytes(data.make_video(rng, 8, 64, "circle", "red", direction)[0])


def wav(*said: str) -> Callable[[random.Random, WordBank], bytes]:
    """Spoken words."""
    return lambda rng, words: media.wav_bytes(make_clip(rng, words, len(said), said).samples)


EXAMPLES = (
    Example(
        "red_circle.png", png("circle", "red"), Turn("Describe the image.", "The image shows a red circle.")
    ),
    Example(
        "blue_triangle.jpg",
        jpeg("triangle", "blue"),
        Turn("Describe the image.", "The image shows a blue triangle."),
    ),
    Example("moving_right.mp4", mp4("right"), Turn("Which way does it move?", "right")),
    Example("seven.wav", wav("seven"), Turn("What was said?", "seven")),
    Example("three_words.wav", wav(*THREE_WORDS), Turn("What was said?", " ".join(THREE_WORDS))),
)


def read_sample(name: str, content: bytes, turn: Turn) -> Sample:
    """The file as a server decodes it."""
    if name.endswith(".mp4"):
        return Sample(turn, videos=[media.decode_mp4(content)])
    if name.endswith(".wav"):
        with wave.open(io.BytesIO(content)) as reader:
            sound = np.frombuffer(reader.readframes(reader.getnframes()), np.int16)
        return Sample(turn, sounds=[sound.astype(np.float32) / 32768])
    return Sample(turn, images=[Image.open(io.BytesIO(content)).convert("RGB")])


def write_examples(folder: Path, out: Path, seed: int, cache: Path) -> None:
    """Fill `out`; raises RuntimeError when the model answers no candidate of an example."""
    model, processor, kwargs = load(folder)
    words = test_words(seed, cache)
    out.mkdir(parents=True, exist_ok=True)
    answers = {}
    for example in EXAMPLES:
        rng = random.Random(f"example {seed} {example.name}")
        for _ in range(NUM_CANDIDATES):
            content = example.make(rng, words)
            sample = read_sample(example.name, content, example.turn)
            if answer(model, processor, kwargs, [sample]) == [example.turn.answer]:
                break
        else:
            raise RuntimeError(f"the model answers none of {NUM_CANDIDATES} candidates for {example.name}")
        (out / example.name).write_bytes(content)
        answers[example.name] = {"question": example.turn.question, "answer": example.turn.answer}
    (out / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")


def main() -> None:
    """Write the examples of a model folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="default: examples inside the model folder")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/demo_model_cache"))
    arguments = parser.parse_args()
    write_examples(
        arguments.model, arguments.out or arguments.model / "examples", arguments.seed, arguments.cache
    )


if __name__ == "__main__":
    main()
