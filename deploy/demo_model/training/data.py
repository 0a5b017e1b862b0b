"""Synthetic images, clips and questions for the demo model; deterministic, numpy only.

Every maker takes a `random.Random` and draws from nothing else, so one seed gives the same bytes everywhere.
Pixels are [H, W, 3] uint8, clips [T, H, W, 3] uint8. Questions come with the one answer that counts as right.

A question of yes or no is answered with the fact first ("It is blue, so no."), so that the model compares
text with text. `is_early` gives the questions of the tokenizer's corpus and of stage B instead, where the
answer was the bare word and counting went up to 20; the model learnt neither in that form.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (200, 40, 40),
    "green": (40, 160, 40),
    "blue": (40, 60, 210),
    "yellow": (225, 215, 40),
    "black": (10, 10, 10),
    "gray": (128, 128, 128),
    "teal": (0, 128, 128),
    "brown": (140, 70, 20),
}
COLOUR_NAMES = tuple(COLOURS)
SHAPES = ("circle", "rectangle", "triangle")
DIRECTIONS = ("left", "right", "up", "down")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = DIGITS + COLOUR_NAMES + SHAPES + DIRECTIONS + ("yes", "no", "hello", "stop", "go")

SMALLEST_SIZE = (64, 64)
IMAGE_SIZES = ((64, 64), (64, 64), (64, 64), (64, 80), (80, 64), (80, 80), (96, 96), (64, 112), (112, 64), (128, 128),
               (96, 144), (144, 96))  # fmt: skip
COLOUR_JITTER = 18
MIN_BACKGROUND = 185

SHAPE_QUESTIONS = ("What shape is in the image?", "Which shape is this?", "What shape is it?")
COLOUR_QUESTIONS = ("What color is the shape?", "What colour is it?", "Which color is the shape?")
DESCRIBE_QUESTIONS = ("Describe the image.", "What is in this image?", "What do you see?")
SEVERAL_QUESTIONS = ("Describe each image.", "Describe the images.", "What is in these images?")
DIRECTION_QUESTIONS = ("Which way does it move?", "Which direction does the shape move?", "Where does it go?")
WORD_QUESTIONS = ("What was said?", "Which word was said?", "Transcribe the audio.")
WORDS_QUESTIONS = ("What was said?", "Which words were said?", "Transcribe the audio.")
BOTH_QUESTIONS = (
    "Describe the image and write the word that was said.",
    "What is in the image and which word was said?",
)
COUNTS = tuple((first, last) for first in range(11) for last in range(first + 2, min(first + 8, 13)))
GREETINGS = ("Hello", "Hello!", "Hi", "Hi!")
WHO_QUESTIONS = ("Who are you?", "What are you?", "What can you do?")
COLOUR_LIST_QUESTIONS = ("Which colors do you know?", "List the colors.")
SHAPE_LIST_QUESTIONS = ("Which shapes do you know?", "List the shapes.")
GREETING_ANSWER = "Hello! Send me an image, a video or a sound."
WHO_ANSWER = "I am a tiny omni demo model. I can see shapes, watch them move and hear words."
COLOUR_LIST_ANSWER = "I know " + ", ".join(COLOUR_NAMES) + "."
SHAPE_LIST_ANSWER = "I know " + ", ".join(SHAPES) + "."


@dataclass(frozen=True)
class Turn:
    """One question about the media of a conversation and its only right answer.

    `key` is the end of the answer that is hard to get right; stage C gives its tokens more weight.
    """

    question: str
    answer: str
    key: str = ""


def coverage(
    shape: str,
    size: tuple[int, int],
    centre: tuple[float, float],
    radius: float,
    aspect: float,
    softness: float,
) -> np.ndarray:
    """Fraction of each pixel that the shape covers, [H, W] float32; softness 0 gives hard edges."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) + 0.5
    dx, dy = np.abs(x - centre[0]), y - centre[1]
    if shape == "circle":
        inside = radius - np.sqrt(dx * dx + dy * dy)
    elif shape == "rectangle":
        inside = np.minimum(radius * aspect - dx, radius / aspect - np.abs(dy))
    else:
        side = (dy + radius - 2 * dx) / np.sqrt(5.0)
        inside = np.minimum(side, radius - dy)
    if softness == 0.0:
        return (inside >= 0).astype(np.float32)
    return np.clip(inside / softness + 0.5, 0.0, 1.0)


def draw_colour(rng: random.Random, name: str) -> np.ndarray:
    """A shade of the named colour, [3] float32."""
    jitter = [rng.uniform(-COLOUR_JITTER, COLOUR_JITTER) for _ in range(3)]
    return np.clip(np.array(COLOURS[name], np.float32) + np.array(jitter, np.float32), 0, 255)


def draw_background(rng: random.Random) -> np.ndarray:
    """A light background colour, [3] float32."""
    return np.array([rng.uniform(MIN_BACKGROUND, 255) for _ in range(3)], np.float32)


def paint(cover: np.ndarray, background: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Blend the shape over its background, [H, W, 3] uint8."""
    return (background + cover[..., None] * (colour - background)).astype(np.uint8)


def draw_softness(rng: random.Random) -> float:
    """Hard edges as often as antialiased ones."""
    return rng.choice((0.0, 1.0, 2.0)) if rng.random() < 0.7 else 0.0


def make_image(
    rng: random.Random,
    size: tuple[int, int] | None = None,
    shape: str | None = None,
    colour: str | None = None,
) -> tuple[np.ndarray, str, str]:
    """One shape on a plain background: (pixels [H, W, 3] uint8, shape, colour)."""
    height, width = size or rng.choice(IMAGE_SIZES)
    shape = shape or rng.choice(SHAPES)
    colour = colour or rng.choice(COLOUR_NAMES)
    shorter = min(height, width)
    radius = rng.uniform(0.15, 0.37) * shorter
    aspect = (
        rng.choice((rng.uniform(1.15, 1.5), 1 / rng.uniform(1.15, 1.5), 1.0)) if shape == "rectangle" else 1.0
    )
    margin = min(radius * max(aspect, 1 / aspect), shorter / 2 - 1)
    centre = (rng.uniform(margin, width - margin), rng.uniform(margin, height - margin))
    softness = draw_softness(rng) * shorter / 64
    cover = coverage(shape, (height, width), centre, radius, aspect, softness)
    return paint(cover, draw_background(rng), draw_colour(rng, colour)), shape, colour


def make_video(
    rng: random.Random,
    num_frames: int = 8,
    side: int = 64,
    shape: str | None = None,
    colour: str | None = None,
    direction: str | None = None,
) -> tuple[np.ndarray, str, str, str]:
    """One shape moving straight: (frames [T, side, side, 3] uint8, shape, colour, direction)."""
    shape = shape or rng.choice(SHAPES)
    colour = colour or rng.choice(COLOUR_NAMES)
    direction = direction or rng.choice(DIRECTIONS)
    radius = rng.uniform(0.125, 0.22) * side
    low, high = radius + 1, side - radius - 1
    fastest = min(4.5 * side / 64, (high - low) / (num_frames - 1))
    step = rng.uniform(min(2.0 * side / 64, 0.8 * fastest), fastest)
    start = rng.uniform(low, high - step * (num_frames - 1))
    across = rng.uniform(low, high)
    background, shade, softness = draw_background(rng), draw_colour(rng, colour), draw_softness(rng)
    frames = []
    for frame_idx in range(num_frames):
        along = start + step * frame_idx
        along = along if direction in ("right", "down") else side - along
        centre = (along, across) if direction in ("left", "right") else (across, along)
        frames.append(paint(coverage(shape, (side, side), centre, radius, 1.0, softness), background, shade))
    return np.stack(frames), shape, colour, direction


def pick_other(rng: random.Random, choices: Sequence[str], truth: str) -> str:
    """A choice that is not the truth."""
    return rng.choice([choice for choice in choices if choice != truth])


def yes_no_turn(question: str, fact: str, is_true: bool, is_early: bool = False) -> Turn:
    """The question, answered by the fact and then the word that follows from it."""
    word = "yes" if is_true else "no"
    return Turn(question, word) if is_early else Turn(question, f"{fact}, so {word}.", key=f" {word}.")


def yes_no_question(rng: random.Random, shape: str, colour: str, is_early: bool = False) -> Turn:
    """A plain question about one image; "yes" and "no" are equally likely and the wording tells nothing."""
    is_true = rng.random() < 0.5
    if rng.random() < 0.5:
        named = shape if is_true else pick_other(rng, SHAPES, shape)
        question, fact = rng.choice((f"Is there a {named}?", f"Is it a {named}?")), f"It is a {shape}"
    else:
        named = colour if is_true else pick_other(rng, COLOUR_NAMES, colour)
        question, fact = rng.choice((f"Is the shape {named}?", f"Is it {named}?")), f"It is {colour}"
    return yes_no_turn(question, fact, is_true, is_early)


def video_yes_no_question(rng: random.Random, direction: str, is_early: bool = False) -> Turn:
    """Whether a shape moves some way."""
    is_true = rng.random() < 0.5
    named = direction if is_true else pick_other(rng, DIRECTIONS, direction)
    return yes_no_turn(f"Does it move {named}?", f"It moves {direction}", is_true, is_early)


def audio_yes_no_question(rng: random.Random, word: str, is_early: bool = False) -> Turn:
    """Whether some word was the one that was said."""
    is_true = rng.random() < 0.5
    named = word if is_true else pick_other(rng, WORDS, word)
    return yes_no_turn(f"Was the word {named} said?", f"The word is {word}", is_true, is_early)


def comparison_drill(rng: random.Random) -> Turn:
    """A question of yes or no without media, behind the fact that decides it."""
    kind = rng.randrange(4)
    if kind == 0:
        turn = video_yes_no_question(rng, rng.choice(DIRECTIONS))
    elif kind == 1:
        turn = audio_yes_no_question(rng, rng.choice(WORDS))
    else:
        turn = yes_no_question(rng, rng.choice(SHAPES), rng.choice(COLOUR_NAMES))
    fact = turn.answer.removesuffix(f", so{turn.key}")
    return Turn(f"{fact}. {turn.question}", turn.answer, turn.key)


def image_question(rng: random.Random, shape: str, colour: str, is_early: bool = False) -> Turn:
    """A random question about one image."""
    kind = rng.randrange(6)
    if kind == 0:
        return Turn(rng.choice(SHAPE_QUESTIONS), shape)
    if kind == 1:
        return Turn(rng.choice(COLOUR_QUESTIONS), colour)
    if kind in (2, 3):
        return yes_no_question(rng, shape, colour, is_early)
    return Turn(rng.choice(DESCRIBE_QUESTIONS), describe_image(shape, colour))


def describe_image(shape: str, colour: str) -> str:
    """The one description that counts as right."""
    return f"The image shows a {colour} {shape}."


def images_question(rng: random.Random, truths: Sequence[tuple[str, str]]) -> Turn:
    """A question about several images, given as (shape, colour) in order."""
    if rng.random() < 0.15:
        return Turn("How many images are there?", str(len(truths)))
    answer = " ".join(
        f"Image {idx}: {colour} {shape}." for idx, (shape, colour) in enumerate(truths, start=1)
    )
    return Turn(rng.choice(SEVERAL_QUESTIONS), answer)


def video_question(
    rng: random.Random, shape: str, colour: str, direction: str, is_early: bool = False
) -> Turn:
    """A random question about one clip."""
    kind = rng.randrange(7)
    if kind == 0:
        return Turn("What shape is in the video?", shape)
    if kind == 1:
        return Turn("What color is the moving shape?", colour)
    if kind == 2:
        return video_yes_no_question(rng, direction, is_early)
    if kind in (3, 4):
        return Turn("Describe the video.", f"The video shows a {colour} {shape} moving {direction}.")
    return Turn(rng.choice(DIRECTION_QUESTIONS), direction)


def audio_question(rng: random.Random, words: Sequence[str], is_early: bool = False) -> Turn:
    """A random question about one sound with the given spoken words."""
    if len(words) == 1:
        if rng.random() < 0.15:
            return audio_yes_no_question(rng, words[0], is_early)
        return Turn(rng.choice(WORD_QUESTIONS), words[0])
    if rng.random() < 0.1:
        return Turn("How many words were said?", str(len(words)))
    return Turn(rng.choice(WORDS_QUESTIONS), " ".join(words))


def image_audio_question(rng: random.Random, shape: str, colour: str, word: str) -> Turn:
    """A question that needs the image and the sound of one prompt."""
    return Turn(rng.choice(BOTH_QUESTIONS), f"{describe_image(shape, colour)} The word is {word}.")


def count_question(rng: random.Random, is_early: bool = False) -> Turn:
    """Count between two numbers: one of `COUNTS`, all equally likely."""
    if is_early:
        first = rng.randrange(0, 11)
        last = rng.randrange(first + 2, 21)
    else:
        first, last = rng.choice(COUNTS)
    answer = ", ".join(str(n) for n in range(first, last + 1)) + "."
    return Turn(f"Count from {first} to {last}.", answer, key=f"{last}.")


def sum_question(rng: random.Random) -> Turn:
    """Add two digits."""
    left, right = rng.randrange(10), rng.randrange(10)
    return Turn(f"What is {left} plus {right}?", str(left + right), key=str(left + right))


def text_question(rng: random.Random, is_early: bool = False) -> Turn:
    """A question that needs no media: count, repeat, add or chat."""
    kind = rng.randrange(4)
    if kind == 0:
        return count_question(rng, is_early)
    if kind == 1:
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))
        return Turn(f"Repeat: {words}", words)
    if kind == 2:
        return sum_question(rng)
    return rng.choice(
        (
            Turn(rng.choice(GREETINGS), GREETING_ANSWER),
            Turn(rng.choice(WHO_QUESTIONS), WHO_ANSWER),
            Turn(rng.choice(COLOUR_LIST_QUESTIONS), COLOUR_LIST_ANSWER),
            Turn(rng.choice(SHAPE_LIST_QUESTIONS), SHAPE_LIST_ANSWER),
        )
    )
